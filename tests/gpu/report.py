# SPDX-License-Identifier: Apache-2.0
"""The table of a GPU check: one line a group of cases, and every failure."""

import time
from collections.abc import Callable

import torch


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
