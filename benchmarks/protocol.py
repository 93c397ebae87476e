# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: shapes, weight sets, rates and timing. README.md beside this states the protocol."""

import math
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

# name: hidden, intermediate, experts, top-k
SHAPES = {
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "seed1": (6144, 2048, 32, 8),
    "seed2": (3584, 3072, 12, 8),
    "gpt-oss-20b": (2880, 2880, 32, 4),
}
ALL_SHAPES = SHAPES | {"deepseek": (7168, 2048, 256, 8)}  # the last only where it is asked for: 6 GB a weight set
TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384]
WEIGHT_BYTES = {"mxfp4": 17 / 32, "nvfp4": 9 / 16, "mxfp4_fp8": 17 / 32}  # a weight with its share of the scale
MEMORY_RATE = 4.3e12  # bytes / s, measured on an H200
TENSOR_RATE = {"a16": 690e12, "w4a8": 1380e12}  # flop / s; bf16 measured, e4m3 taken as twice that
REPLAYS = 15
COLD_CALLS = 25
FLUSH_BYTES = 256 << 20  # written between cold calls: several times the 60 MB of L2


def require_gpu() -> None:
    """Ends the program with what is missing where there is no CUDA device."""
    if not torch.cuda.is_available():
        sys.exit(f"{Path(sys.argv[0]).name} needs an SM90 GPU: torch {torch.__version__} finds no CUDA device")


def weight_sets(shape: str, fmt: str) -> int:
    """How many layers of one shape it takes that each is out of L2 when its turn comes again."""
    hidden, intermediate, _, top_k = ALL_SHAPES[shape]
    return max(2, min(24, int(300e6 / (3 * hidden * intermediate * WEIGHT_BYTES[fmt] * top_k)) + 1))


def captured(run: Callable[[], object]) -> Callable[[], None]:
    """run() as a CUDA graph; it must have run before. The graph lives as long as what is returned."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def timed_calls(call: Callable[[], object], before: Callable[[], object] | None, calls: int) -> list[float]:
    """Sorted microseconds of call() by CUDA events, each after before(), which is not timed.

    The host queues everything at once where there is a before(); it has to take longer than the host needs for a call.
    """
    events = []
    for _ in range(calls):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if before is None:
            torch.cuda.synchronize()
        else:
            before()
        start.record()
        call()
        stop.record()
        events.append((start, stop))
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(stop) * 1e3 for start, stop in events)


def replay_times(run: Callable[[], object], sets: int) -> list[float]:
    """Sorted microseconds a layer of REPLAYS graph replays; run() runs every one of `sets` layers once."""
    run()
    torch.cuda.synchronize()
    return [us / sets for us in timed_calls(captured(run), None, REPLAYS)]


def cold_times(run: Callable[[], object], flush: Callable[[], object], *, eager: bool = False) -> list[float]:
    """Sorted microseconds of COLD_CALLS graph replays of run(), with L2 flushed by flush() before each.

    run() must have run before. Eager: the calls themselves instead of replays, for what cannot be captured.
    """
    call = run if eager else captured(run)
    call()
    torch.cuda.synchronize()
    return timed_calls(call, flush, COLD_CALLS)


def geometric_mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values))


class Deadline:
    """A number of seconds from now on; None never passes."""

    def __init__(self, seconds: float | None) -> None:
        self.end = None if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float | None:
        return None if self.end is None else self.end - time.monotonic()

    @property
    def passed(self) -> bool:
        return self.end is not None and time.monotonic() >= self.end
