# SPDX-License-Identifier: Apache-2.0
"""What the whole-layer benchmarks share: shapes, weight sets and timing. README.md beside this states the protocol."""

from collections.abc import Callable

import torch

# name: hidden, intermediate, experts, top-k
SHAPES = {
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "seed1": (6144, 2048, 32, 8),
    "seed2": (3584, 3072, 12, 8),
    "gpt-oss-20b": (2880, 2880, 32, 4),
}
TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384]
WEIGHT_BYTES = {"mxfp4": 17 / 32, "nvfp4": 9 / 16, "mxfp4_fp8": 17 / 32}  # a weight with its share of the scale
REPLAYS = 15


def weight_sets(shape: str, fmt: str) -> int:
    """How many layers of one shape it takes that each is out of L2 when its turn comes again."""
    hidden, intermediate, _, top_k = SHAPES[shape]
    return max(2, min(24, int(300e6 / (3 * hidden * intermediate * WEIGHT_BYTES[fmt] * top_k)) + 1))


def replay_times(run: Callable[[], object], sets: int) -> list[float]:
    """Sorted microseconds a layer of REPLAYS graph replays; run() runs every one of `sets` layers once."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(REPLAYS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / sets)
    return sorted(times)
