# SPDX-License-Identifier: Apache-2.0
"""The table of a GPU check: one line a group of cases, and every failure; the command line that runs groups."""

import argparse
import time
from collections.abc import Callable

import torch

from vllm_humming import ops
from vllm_humming.moe.weight_formats import WEIGHT_FORMATS


class Report:
    """Collects one line a group."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.start = time.time()
        self.group, self.worst, self.worst_case, self.cases = "", 0.0, "", 0

    def seconds(self) -> float:
        return time.time() - self.start

    def begin(self, group: str) -> None:
        self.group, self.worst, self.worst_case, self.cases = group, 0.0, "-", 0

    def case(self, name: str, check: Callable[[], float]) -> None:
        self.cases += 1
        try:
            error = check()
        except Exception as failure:  # one failure must not hide the others
            self.failures.append(f"{self.group}: {name}: {type(failure).__name__}: {failure}")
            if len(self.failures) <= 40:
                print("FAIL", self.failures[-1], flush=True)
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # an illegal access ends the script here
            return
        if error >= self.worst:
            self.worst, self.worst_case = error, name

    def end(self) -> None:
        failed = sum(f.startswith(f"{self.group}:") for f in self.failures)
        verdict = "ok" if not failed else f"{failed} FAILED"
        worst = f"worst {self.worst:.2e} ({self.worst_case})"
        print(
            f"{self.group:<24} {self.cases:>4} cases  {worst:<56} {self.seconds():6.1f} s  {verdict}",
            flush=True,
        )


def run_groups(doc: str | None, groups: dict[str, Callable[[Report, argparse.Namespace], None]], **flags: str) -> int:
    """A check's main(): runs the chosen groups in each chosen format, args.format; the exit status.

    flags: names of further options without a value, and their help.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, text in flags.items():
        parser.add_argument(f"--{flag}", action="store_true", help=text)
    parser.add_argument("--only", nargs="+", choices=list(groups), default=list(groups))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--formats", nargs="+", choices=list(WEIGHT_FORMATS), default=list(WEIGHT_FORMATS))
    args = parser.parse_args()
    if args.device == "cuda":
        ops.load_kernels()
        torch.cuda.init()
    report = Report()
    for name in args.formats:
        print(name, flush=True)
        args.format = WEIGHT_FORMATS[name]
        for group in args.only:
            groups[group](report, args)
    print(f"{len(report.failures)} failures in {report.seconds():.0f} s")
    return 1 if report.failures else 0
