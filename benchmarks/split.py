# SPDX-License-Identifier: Apache-2.0
"""What each kernel adds to the time of a routed-experts layer; needs torch and the kernels, not vLLM.

usage: PYTHONPATH=. python3 benchmarks/split.py [--shapes ...] [--ms ...] [--routing KIND] [--dtype bf16|fp16]
           [--fmt mxfp4|nvfp4|mxfp4_fp8] [--tiles UP,DOWN] [--library FILE]
One line a point, in microseconds, kernels in the order in which they end. A kernel starts before the one ahead has
ended and its duration includes that wait, so what counts is how much later it ends than the one ahead: the median over
all layers of the replays (the first of a layer: since the layer before; layers as in layer.py). Tracing costs a little:
compare builds (--library, one process each), and take whole layers from layer.py.
"""

import argparse
import re
import sys
from pathlib import Path
from statistics import median

import torch
from layer import Layer, launcher, load_library, tile_pair
from protocol import REPLAYS, SHAPES, captured, require_gpu
from routing import ROUTINGS
from torch.profiler import ProfilerActivity, profile

from vllm_humming.moe import schedule
from vllm_humming.moe.weight_formats import WEIGHT_FORMATS


def short_name(name: str) -> str:
    """A kernel's name without namespaces, template and function arguments; the GEMM's is `kernel`."""
    found = re.match(r"(?:\w*::)*(\w+)", name.replace("(anonymous namespace)", "").removeprefix("void "))
    return found.group(1) if found else name


def steps(events: list[tuple[str, float]], layers: int) -> list[tuple[str, float]]:
    """(kernel, median microseconds between its end and the end of the one ahead) of one layer, in order.

    events: (kernel, end in microseconds) of `layers` equal layers, one after the other. Raises ValueError if they are
    not equal.
    """
    events = sorted(events, key=lambda event: event[1])
    each = len(events) // layers
    names = [name for name, _ in events[:each]]
    if not each or [name for name, _ in events] != names * layers:
        raise ValueError(f"{len(events)} kernels are not {layers} times the same ones")
    ends = [end for _, end in events]
    added = [[ends[i] - ends[i - 1] for i in range(k, len(ends), each) if i] for k in range(each)]
    return [(name, median(times)) for name, times in zip(names, added, strict=True)]


def measure(layer: Layer, tokens: int, routing: str, tiles: tuple[int, int] | None) -> list[tuple[str, float]]:
    """tiles: of the up and the down GEMM; None: the selected ones."""
    tiles = tiles or schedule.select(*layer.sizes(tokens), path=layer.path)
    run, _ = launcher(layer, layer.batch(tokens, routing), tiles)
    run()
    torch.cuda.synchronize()
    replay = captured(run)
    replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        for _ in range(REPLAYS):
            replay()
        torch.cuda.synchronize()
    device = torch.autograd.DeviceType.CUDA
    events = [(short_name(e.name), e.time_range.end) for e in traced.events() if e.device_type == device]
    return steps(events, REPLAYS * len(layer.sets))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--ms", nargs="+", type=int, default=[1, 64, 512, 4096], metavar="M")
    parser.add_argument("--routing", choices=ROUTINGS, default="uniform")
    parser.add_argument("--dtype", choices=["bf16", "fp16"], default="bf16")
    parser.add_argument("--fmt", choices=list(WEIGHT_FORMATS), default="mxfp4")
    parser.add_argument("--tiles", type=tile_pair, metavar="UP,DOWN", help="force these tiles, by name or index")
    parser.add_argument("--library", type=Path, help="kernels to load instead of the package's")
    args = parser.parse_args()
    require_gpu()
    load_library(args.library)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.fmt.upper()} x {args.dtype}")
    for name in args.shapes:
        layer = Layer(name, {"bf16": torch.bfloat16, "fp16": torch.float16}[args.dtype], args.fmt)
        for tokens in args.ms:
            parts = measure(layer, tokens, args.routing, args.tiles)
            line = "  ".join(f"{kernel} {us:.1f}" for kernel, us in parts)
            print(f"{name:<14} {tokens:>6}  {line}  = {sum(us for _, us in parts):.1f}", flush=True)
        del layer
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
