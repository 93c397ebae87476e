# SPDX-License-Identifier: Apache-2.0
"""Times one GEMM of a MoE layer (or a linear layer) alone, cold L2, beside every installed peer in the same process.

usage: PYTHONPATH=. python3 benchmarks/gemm.py [--sets ...] [--formats ...] [--ms ...] [--routing ...] [--peers ...]
           [--tiles TILE|sweep] [--m-major] [--jobs N] [--deadline SECONDS] [--out FILE]
Prints a table and, with --out, appends one JSON line a contestant and point. benchmarks/README.md states the protocol.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, TextIO

import torch
from contestants import COMPILING, CONTESTANTS, SETS, Call, Calls, Gemm, LeftOut, Options, Rows
from protocol import (
    FLUSH_BYTES,
    MEMORY_RATE,
    TENSOR_RATE,
    WEIGHT_BYTES,
    Deadline,
    cold_times,
    geometric_mean,
    require_gpu,
)
from routing import ROUTINGS

from vllm_humming import ops
from vllm_humming.moe import schedule
from vllm_humming.moe.weight_formats import WEIGHT_FORMATS

REST_SECONDS = 0.15  # before each contestant: behind large products clocks differ, by up to 25 % of a small one's time
DEFAULT_MS = [1, 8, 64, 512, 4096]
LINEAR_MS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
MOE_SETS = [name for name in SETS if name != "linear"]


def floor_us(rows: Rows, fmt: str) -> float:
    """What the weights of the active experts, x and the result need of memory, or the flops of the tensor cores."""
    gemm, path = rows.gemm, WEIGHT_FORMATS[fmt].path
    read = rows.active * gemm.n * gemm.k * WEIGHT_BYTES[fmt] + rows.row_bytes(1 if path == "w4a8" else 2)
    return max(read / MEMORY_RATE, rows.flops / TENSOR_RATE[path]) * 1e6


def first_call(call: Call) -> tuple[float, bool]:
    """(seconds of the first call, which may compile; whether every row of the result was written, and finite)."""
    if call.out is not None:
        call.out.fill_(float("nan"))
    began = time.perf_counter()
    returned = call.run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    result = call.out if call.out is not None else returned
    assert result is not None
    return seconds, bool((result if call.valid is None else result[call.valid]).isfinite().all())


def measure(call: Call, rows: Rows, fmt: str, flush: Callable[[], object]) -> dict[str, Any]:
    """The record of one contestant at one point."""
    seconds, finite = first_call(call)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        time.sleep(REST_SECONDS)
    timing = "graph"
    try:
        times = cold_times(call.run, flush)
    except RuntimeError:
        if call.role in ("ours", "sweep"):  # capture is part of what this package promises
            raise
        timing = "eager"
        times = cold_times(call.run, flush, eager=True)
    us, floor = times[len(times) // 2], floor_us(rows, fmt)
    gemm = rows.gemm
    traffic = call.weight_bytes + rows.row_bytes(1 if WEIGHT_FORMATS[fmt].path == "w4a8" else 2)
    return {
        "label": call.label,
        "role": call.role,
        "version": call.version,
        "fmt": fmt,
        "set": gemm.set,
        "gemm": gemm.name,
        "n": gemm.n,
        "k": gemm.k,
        "e": gemm.experts,
        "topk": gemm.top_k,
        "routing": rows.routing,
        "m": rows.tokens,
        "rows": rows.total,
        "active": rows.active,
        "tile": call.tile,
        "us": round(us, 2),
        "us_min": round(times[0], 2),
        "us_max": round(times[-1], 2),
        "tflops": round(rows.flops / us / 1e6, 1),
        "gbps": round(call.weight_bytes / us / 1e3, 1),
        "floor_us": round(floor, 2),
        "floor_percent": round(100 * floor / us, 1),
        "flop_per_byte": round(rows.flops / traffic, 2),
        "first_call_s": round(seconds, 2),
        "timing": timing,
        "finite": finite,
    }


def fastest(records: list[dict[str, Any]], role: str) -> dict[str, Any] | None:
    return min((r for r in records if r["role"] == role), key=lambda r: r["us"], default=None)


def with_ratios(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records of one point, each with x: how many times longer the best peer takes (None without a peer)."""
    best = fastest(records, "peer")
    return [r | {"x": round(best["us"] / r["us"], 3) if best else None} for r in records]


def print_header() -> None:
    print(f"  {'':<18} {'tile':<14} {'us':>9} {'TFLOP/s':>8} {'TB/s':>6} {'% roof':>6} {'x':>6}")


def print_point(rows: Rows, fmt: str, records: list[dict[str, Any]]) -> None:
    gemm, point = rows.gemm, records[0]
    routed = "" if gemm.is_linear else f", {rows.routing}: {rows.total} rows, {rows.active} of {gemm.experts} experts"
    print(f"{gemm.set} {gemm.name} N {gemm.n} K {gemm.k} {fmt} M {rows.tokens}{routed}, roof {point['floor_us']} us")
    for r in sorted(records, key=lambda r: (("ours", "sweep", "peer", "roof").index(r["role"]), r["us"])):
        ratio = "-" if r["x"] is None else f"{r['x']:.2f}"
        notes = ["NOT FINITE"] * (not r["finite"]) + ["eager"] * (r["timing"] == "eager")
        notes += [f"first call {r['first_call_s']} s"] * (r["first_call_s"] >= 1)
        print(
            f"  {r['label']:<18} {r['tile']:<14} {r['us']:>9.2f} {r['tflops']:>8.1f} {r['gbps'] / 1e3:>6.2f} "
            f"{r['floor_percent']:>6.0f} {ratio:>6}  {', '.join(notes)}".rstrip(),
            flush=True,
        )


def point_of(record: dict[str, Any]) -> tuple:
    return tuple(record[key] for key in ("set", "gemm", "routing", "m"))


def summary(records: list[dict[str, Any]]) -> Iterator[str]:
    """Lines: for each format, ours against every other contestant and the best peer; geometric means, worst points.

    "ours" is the faster layout of each point; each layout follows by itself.
    """
    points: dict[str, dict[tuple, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        points[record["fmt"]][point_of(record)].append(record)
    for fmt, by_point in points.items():
        ratios: dict[tuple[str, str], list[tuple[float, tuple]]] = defaultdict(list)
        for point, contestants in by_point.items():
            mine = {r["label"]: r["us"] for r in contestants if r["role"] == "ours"}
            others = {r["label"]: r["us"] for r in contestants if r["role"] in ("peer", "roof")}
            if best := fastest(contestants, "peer"):
                others["best peer"] = best["us"]
            layouts = mine if len(mine) > 1 else {}
            own = {"ours": min(mine.values())} | layouts if mine else {}
            for (name, us), (other, theirs) in product(own.items(), others.items()):
                ratios[name, other].append((theirs / us, point))
        for (name, other), values in sorted(ratios.items(), key=lambda item: (item[0][0], item[0][1] != "best peer")):
            worst, where = min(values)
            mean, slower = geometric_mean(r for r, _ in values), sum(ratio < 0.97 for ratio, _ in values)
            yield (
                f"{fmt}: {other} / {name}: geometric mean {mean:.2f}, worst {worst:.2f} "
                f"({' '.join(map(str, where))}), below 0.97 at {slower} of {len(values)} points"
            )


class Run:
    """What one run has measured; writes each point as soon as it is complete."""

    def __init__(self, args: argparse.Namespace, out: TextIO | None, deadline: Deadline) -> None:
        self.args, self.out, self.deadline = args, out, deadline
        self.options = Options(args.tiles, args.m_major)
        self.records: list[dict[str, Any]] = []
        self.left_out: set[str] = set()
        self.failed = 0
        flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.options.device)
        self.flush = flush.zero_

    def ms(self, gemm: Gemm) -> list[int]:
        return self.args.ms or (LINEAR_MS if gemm.is_linear else DEFAULT_MS)

    def contestants(self, gemm: Gemm, fmt: str) -> dict[str, Calls]:
        """Those that take part, with their weights made; says once of each other why it does not."""
        ready = {}
        for name in self.args.peers:
            try:
                ready[name] = CONTESTANTS[name](gemm, fmt, self.options)
            except LeftOut as reason:
                self.note(f"left out: {name}: {reason}")
            except Exception as error:
                self.fail(name, f"{gemm.set} {gemm.name} {fmt}", error)
        return ready

    def note(self, line: str) -> None:
        if line not in self.left_out:
            self.left_out.add(line)
            print(line, flush=True)

    def fail(self, name: str, where: str, error: Exception) -> None:
        """Reports an error of one contestant; raises it again if the GPU does not work any more."""
        self.failed += 1
        print(f"FAIL {name} {where}: {type(error).__name__}: {str(error)[:400]}", flush=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def point(self, rows: Rows, fmt: str, ready: dict[str, Calls]) -> None:
        """Measures every contestant at one point. A point that the deadline cuts keeps what it has."""
        found = []
        for name, calls in ready.items():
            if self.deadline.passed:
                break
            try:
                for call in calls(rows):
                    if self.args.compile_only:
                        first_call(call)
                    else:
                        found.append(measure(call, rows, fmt, self.flush))
            except Exception as error:
                self.fail(name, f"{rows.gemm.set} {rows.gemm.name} {fmt} {rows.routing} M {rows.tokens}", error)
        if not found:
            return
        found = with_ratios(found)
        print_point(rows, fmt, found)
        self.records += found
        if self.out:
            self.out.writelines(json.dumps(record) + "\n" for record in found)
            self.out.flush()

    def all(self) -> bool:
        """Measures everything that was asked for; False when the deadline came first."""
        gemms = [gemm for name in self.args.sets for gemm in SETS[name]]
        for gemm, fmt in product(gemms, self.args.formats):
            if self.deadline.passed:
                return False
            ready = self.contestants(gemm, fmt)
            for routing, tokens in product(["uniform"] if gemm.is_linear else self.args.routing, self.ms(gemm)):
                if self.deadline.passed:
                    return False
                self.point(Rows(gemm, tokens, routing, device=self.options.device), fmt, ready)
            del ready
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return not self.deadline.passed


def compile_first(args: argparse.Namespace, deadline: Deadline) -> None:
    """Lets args.jobs processes call the peers' kernels once for every point, so that their caches on disk are full."""

    def one(which: tuple[str, str]) -> tuple[str, str, int, str]:
        left = deadline.left
        if left is not None and left <= 0:
            return *which, 0, "DEADLINE"
        done = subprocess.run(compile_command(args, *which, left), capture_output=True, text=True)
        return *which, done.returncode, done.stdout + done.stderr

    if not set(args.peers) & set(COMPILING):
        return
    began = time.perf_counter()
    with ThreadPoolExecutor(args.jobs) as pool:
        for name, fmt, status, output in pool.map(one, product(args.sets, args.formats)):
            lines = [line for line in output.splitlines() if line.startswith(("FAIL", "DEADLINE"))]
            lines += output.splitlines()[-3:] if status and not lines else []
            for line in lines:
                print(f"compiling {name} {fmt}: {line}", flush=True)
    print(f"peers' kernels called once by {args.jobs} processes in {time.perf_counter() - began:.0f} s", flush=True)


def compile_command(args: argparse.Namespace, name: str, fmt: str, seconds: float | None) -> list[str]:
    command = [sys.executable, str(Path(__file__).resolve()), "--compile-only", "--sets", name, "--formats", fmt]
    command += ["--routing", *args.routing, "--peers", *(peer for peer in args.peers if peer in COMPILING)]
    command += ["--ms", *map(str, args.ms)] if args.ms else []
    command += ["--m-major"] * args.m_major
    return command + ([] if seconds is None else ["--deadline", f"{seconds:.0f}"])


def tile(text: str) -> str | int:
    names = [t.name for t in schedule.TILES]
    if text == "sweep":
        return text
    if text in names:
        return names.index(text)
    raise argparse.ArgumentTypeError(f"no tile {text!r}; sweep, or one of {', '.join(names)}")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=MOE_SETS)
    parser.add_argument("--formats", nargs="+", choices=list(WEIGHT_FORMATS), default=list(WEIGHT_FORMATS))
    parser.add_argument("--ms", nargs="+", type=int, metavar="M", help="tokens, the most wanted first")
    parser.add_argument("--routing", nargs="+", choices=ROUTINGS, default=["uniform"])
    parser.add_argument("--peers", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS))
    parser.add_argument("--tiles", type=tile, metavar="TILE", help="a tile by name, or sweep: time every tile too")
    parser.add_argument("--m-major", action="store_true", help="FP8 token scales with the tokens together in memory")
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="first let N processes compile peers' kernels")
    parser.add_argument("--compile-only", action="store_true", help="call everything once, measure nothing")
    parser.add_argument("--deadline", type=float, metavar="SECONDS", help="stop after that time and keep what is there")
    parser.add_argument("--out", type=Path, help="append one JSON line a contestant and point")
    args = parser.parse_args(arguments)
    if isinstance(args.tiles, int):
        path = schedule.TILES[args.tiles].path
        wrong = [fmt for fmt in args.formats if WEIGHT_FORMATS[fmt].path != path]
        if wrong:
            parser.error(f"tile {schedule.TILES[args.tiles].name} is for the path {path}, not for {', '.join(wrong)}")
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    require_gpu()
    deadline = Deadline(args.deadline)
    if "ours" in args.peers:
        ops.load_kernels()
    if args.jobs:
        compile_first(args, deadline)
    out = args.out.open("a") if args.out else None
    run = Run(args, out, deadline)
    if not args.compile_only:
        tick = torch.zeros(1, device="cuda")
        empty = cold_times(tick.zero_, run.flush)
        print(
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}; x: the best peer's time over this one; "
            f"every time has the {empty[len(empty) // 2]:.1f} us that an all but empty graph takes"
        )
        print_header()
    complete = False
    try:
        complete = run.all()
    finally:
        for line in summary(run.records):
            print(line)
        if out:
            out.close()
    if not complete:
        print("DEADLINE: not every point was measured")
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
