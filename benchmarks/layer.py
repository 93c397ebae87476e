# SPDX-License-Identifier: Apache-2.0
"""Times the routed-experts op as a CUDA-graph replay over rotating weight sets; needs torch and the kernels, not vLLM.

usage: PYTHONPATH=. python3 benchmarks/layer.py [--shapes ...] [--ms ...] [--routing ...] [--dtype bf16|fp16]
           [--fmt mxfp4|nvfp4|mxfp4_fp8] [--tiles UP,DOWN] [--sweep-tiles [pairs]] [--candidates TILE ...]
           [--library FILE] [--peers FILE ...] [--label TEXT] [--out FILE]
Prints a table and, with --out, appends one JSON line a point. benchmarks/README.md states the protocol.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from packed_weights import random_projection
from protocol import (
    ALL_SHAPES,
    MEMORY_RATE,
    SHAPES,
    TENSOR_RATE,
    TOKENS,
    WEIGHT_BYTES,
    geometric_mean,
    replay_times,
    require_gpu,
    weight_sets,
)
from routing import ROUTINGS, route
from torch import Tensor

from vllm_humming import ops
from vllm_humming.moe import schedule
from vllm_humming.moe.packing import CHUNK_K, PackedProjection, padded_k
from vllm_humming.moe.weight_formats import WEIGHT_FORMATS


class Layer:
    """As many random weight sets of one shape as it takes to read every weight from memory."""

    def __init__(self, name: str, dtype: torch.dtype, fmt: str = "mxfp4") -> None:
        self.name, self.dtype, self.fmt = name, dtype, fmt
        self.hidden, self.intermediate, self.experts, self.top_k = ALL_SHAPES[name]
        self.expert_bytes = 3 * self.hidden * self.intermediate * WEIGHT_BYTES[fmt]
        self.sets = [self._random_set() for _ in range(weight_sets(name, fmt))]

    def _random_set(self) -> tuple[PackedProjection, PackedProjection]:
        make = {"experts": self.experts, "fmt": self.fmt, "dtype": self.dtype}
        rows = 2 * self.intermediate
        w13 = random_projection(n=rows, k=self.hidden, gated=True, pad_rows_to=CHUNK_K, **make)
        w2 = random_projection(n=self.hidden, k=self.intermediate, **make)
        return w13, w2

    def batch(self, tokens: int, routing: str) -> tuple[Tensor, Tensor, Tensor]:
        gen = torch.Generator(device="cuda").manual_seed(tokens)
        x = torch.randn(tokens, self.hidden, generator=gen, device="cuda").to(self.dtype)
        return x, *route(tokens, self.experts, self.top_k, routing, gen)

    def sizes(self, tokens: int) -> tuple[int, int, int, int, int]:
        return tokens, self.top_k, self.experts, self.hidden, padded_k(self.intermediate)

    @property
    def path(self) -> str:
        return WEIGHT_FORMATS[self.fmt].path


def load_library(path: Path | None) -> None:
    """Loads the package's kernels, or those of another build; one of them a process."""
    if path:
        ops.LIBRARY_PATH = path.resolve()
    ops.load_kernels()


def launcher(layer: Layer, inputs: tuple[Tensor, Tensor, Tensor], tiles: tuple[int, int]) -> tuple[Callable, Tensor]:
    """(a function that runs every weight set once, the output of the last)."""
    x, weights, ids = inputs
    code = WEIGHT_FORMATS[layer.fmt].code
    size = torch.ops.vllm_humming.moe_workspace_bytes(*layer.sizes(x.shape[0]), code)
    workspace, out = torch.empty(size, dtype=torch.uint8, device="cuda"), torch.empty_like(x)

    def run() -> None:
        for w13, w2 in layer.sets:
            torch.ops.vllm_humming.moe(
                x, weights, ids, None, *w13.tensors, *w2.tensors, workspace, out, code,
                0, 1.0, 0.0, math.inf, False, *tiles,
            )  # fmt: skip

    return run, out


def measure(layer: Layer, tokens: int, routing: str, tiles: tuple[int, int]) -> dict[str, Any]:
    inputs = layer.batch(tokens, routing)
    run, out = launcher(layer, inputs, tiles)
    times = replay_times(run, len(layer.sets))
    us = times[len(times) // 2]
    active = inputs[2].unique().numel()
    read = active * layer.expert_bytes
    flops = 6 * tokens * layer.top_k * layer.hidden * layer.intermediate
    floor = max(read / MEMORY_RATE, flops / TENSOR_RATE[layer.path]) * 1e6
    # The same with rows as they are computed: at least in eights an expert.
    padded = int((inputs[2].flatten().bincount() + 7).div(8, rounding_mode="floor").sum()) * 8
    padded_flops = flops * padded / (tokens * layer.top_k)
    work = max(read / MEMORY_RATE, padded_flops / TENSOR_RATE[layer.path]) * 1e6
    return {
        "fmt": layer.fmt,
        "dtype": str(layer.dtype).removeprefix("torch."),
        "shape": layer.name,
        "routing": routing,
        "m": tokens,
        "us": round(us, 1),
        "us_min": round(times[0], 1),
        "us_max": round(times[-1], 1),
        "active": active,
        "gbps": round(read / us / 1e3, 1),
        "tflops": round(flops / us / 1e6, 1),
        "floor_us": round(floor, 1),
        "floor_percent": round(100 * floor / us, 1),
        "work_us": round(work, 2),
        "tiles": [schedule.TILES[t].name for t in tiles],
        "finite": bool(out.isfinite().all()),
    }


def read_peers(paths: list[Path], fmt: str) -> dict[str, dict[tuple, float]]:
    """label -> (shape, routing, m) -> us of whole layers of that format. A record without a routing is uniform."""
    peers: dict[str, dict[tuple, float]] = {}
    for path in paths:
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if "us" in record and "shape" in record and record.get("fmt", "mxfp4") == fmt:
                key = (record["shape"].removesuffix("-pad"), record.get("routing", "uniform"), record["m"])
                peers.setdefault(record.get("label") or record["peer"], {})[key] = record["us"]
    return peers


def print_header(peers: dict, skew: bool = False) -> None:
    for i, label in enumerate(peers, 1):
        print(f"peer {i}: {label}")
    columns = "".join(f"{f'peer {i}':>9} {'x':>5}" for i in range(1, len(peers) + 1))
    ours = f"{'us':>9} {'TB/s':>6} {'TFLOP/s':>8} {'floor us':>9} {'%':>4}"
    columns += f" {'time x':>6} {'work x':>6} {'left%':>5}" * skew
    print(f"{'shape':<14} {'routing':<8} {'M':>6} {ours}{columns}  tiles")


def print_row(record: dict[str, Any], peers: dict, skew: str = "") -> None:
    key = (record["shape"], record["routing"], record["m"])
    columns = ""
    for times in peers.values():
        us = times.get(key)
        columns += f"{us:>9.1f} {us / record['us']:>5.2f}" if us else f"{'-':>9} {'-':>5}"
    rates = f"{record['gbps'] / 1e3:>6.2f} {record['tflops']:>8.1f}"
    ours = f"{record['us']:>9.1f} {rates} {record['floor_us']:>9.1f} {record['floor_percent']:>4.0f}"
    columns += skew
    note = "" if record["finite"] else "  NOT FINITE"
    print(f"{key[0]:<14} {key[1]:<8} {key[2]:>6} {ours}{columns}  {' '.join(record['tiles'])}{note}", flush=True)


def print_geomean(records: list[dict[str, Any]], peers: dict) -> None:
    for label, times in peers.items():
        ratios = [times[key] / r["us"] for r in records if (key := (r["shape"], r["routing"], r["m"])) in times]
        if ratios:
            mean = geometric_mean(ratios)
            print(f"{label}: geometric mean {mean:.2f}x, worst {min(ratios):.2f}x over {len(ratios)} points")


def beyond_work(record: dict[str, Any], uniform: dict[str, Any]) -> float:
    """Time over that of uniform routing and over what the added work explains; less work explains nothing."""
    return record["us"] / uniform["us"] / max(1.0, record["work_us"] / uniform["work_us"])


def skew_columns(record: dict[str, Any], uniform: dict[str, Any] | None) -> str:
    """How much longer a layer takes than with uniform routing, how much work was added, and what that leaves open."""
    if uniform is None or record is uniform:
        return f" {'':>6} {'':>6} {'':>5}"
    taken, work = record["us"] / uniform["us"], record["work_us"] / uniform["work_us"]
    return f" {taken:>6.2f} {work:>6.2f} {100 * (beyond_work(record, uniform) - 1):>+5.0f}"


def print_skew(records: list[dict[str, Any]]) -> None:
    """The worst of each routing that is not uniform."""
    uniform = {(r["shape"], r["m"]): r for r in records if r["routing"] == "uniform"}
    beyond: dict[str, list[tuple[float, str, int]]] = {}
    for r in records:
        base = uniform.get((r["shape"], r["m"]))
        if base and r["routing"] != "uniform":
            beyond.setdefault(r["routing"], []).append((beyond_work(r, base), r["shape"], r["m"]))
    for routing, values in beyond.items():
        worst, shape, tokens = max(values)
        over = sum(value > 1.1 for value, _, _ in values)
        print(
            f"{routing}: at most {100 * (worst - 1):+.0f} % beyond what the added work explains ({shape}, {tokens} "
            f"tokens); more than 10 % at {over} of {len(values)} points"
        )


def tile_index(text: str) -> int:
    names = [t.name for t in schedule.TILES]
    if text in names:
        return names.index(text)
    if text.isdigit() and int(text) < len(names):
        return int(text)
    raise argparse.ArgumentTypeError(f"no tile {text!r}; one of {', '.join(names)} or 0..{len(names) - 1}")


def tile_pair(text: str) -> tuple[int, int]:
    up, _, down = text.partition(",")
    return tile_index(up), tile_index(down or up)


def sweep(layer: Layer, tokens: int, routing: str, every_pair: bool, candidates: list[int]) -> list[dict[str, Any]]:
    """Every candidate (none: every tile) for each GEMM beside the selected tile of the other, or every pair of them;
    then the best of both."""
    chosen = schedule.select(*layer.sizes(tokens), path=layer.path)
    every = [tile for tile in schedule.tiles_of(layer.path) if not candidates or tile in candidates]
    if every_pair:
        return [measure(layer, tokens, routing, pair) for pair in product(every, every)]
    ups = {t: measure(layer, tokens, routing, (t, chosen[1])) for t in every}
    downs = {t: measure(layer, tokens, routing, (chosen[0], t)) for t in every}
    best = min(every, key=lambda t: ups[t]["us"]), min(every, key=lambda t: downs[t]["us"])
    return [*ups.values(), *downs.values(), measure(layer, tokens, routing, best)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(ALL_SHAPES), default=list(SHAPES))
    parser.add_argument("--ms", nargs="+", type=int, default=TOKENS, metavar="M")
    parser.add_argument("--routing", nargs="+", choices=ROUTINGS, default=["uniform"])
    parser.add_argument("--dtype", choices=["bf16", "fp16"], default="bf16")
    parser.add_argument("--fmt", choices=list(WEIGHT_FORMATS), default="mxfp4")
    parser.add_argument("--tiles", type=tile_pair, metavar="UP,DOWN", help="force these tiles, by name or index")
    parser.add_argument(
        "--sweep-tiles",
        nargs="?",
        const="each",
        choices=["each", "pairs"],
        help="time every tile for each GEMM beside the selected one of the other, or every pair",
    )
    parser.add_argument(
        "--candidates",
        nargs="+",
        type=tile_index,
        default=[],
        metavar="TILE",
        help="sweep these alone, by name or index",
    )
    parser.add_argument("--library", type=Path, help="kernels to load instead of the package's")
    parser.add_argument("--peers", nargs="+", type=Path, default=[], metavar="FILE", help="JSON lines to print beside")
    parser.add_argument("--label", default="vllm-humming")
    parser.add_argument("--out", type=Path, help="append one JSON line a point")
    args = parser.parse_args()
    if any(tile not in schedule.tiles_of(WEIGHT_FORMATS[args.fmt].path) for tile in args.candidates):
        parser.error(f"--candidates: not all of them are tiles for {args.fmt}")
    require_gpu()
    load_library(args.library)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[args.dtype]
    peers = read_peers(args.peers, args.fmt)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.fmt.upper()} x {args.dtype}")
    # Uniform first: the others are compared with it.
    routings = sorted(dict.fromkeys(args.routing), key=lambda routing: routing != "uniform")
    compared = "uniform" in routings and len(routings) > 1
    print_header(peers, compared)
    records: list[dict[str, Any]] = []
    for name in args.shapes:
        layer = Layer(name, dtype, args.fmt)
        uniform: dict[int, dict[str, Any]] = {}
        for routing, tokens in product(routings, args.ms):
            selected = args.tiles or schedule.select(*layer.sizes(tokens), path=layer.path)
            chosen = measure(layer, tokens, routing, selected)
            if routing == "uniform":
                uniform[tokens] = chosen
            print_row(chosen, peers, skew_columns(chosen, uniform.get(tokens)) if compared else "")
            records.append(chosen)
            points = [chosen]
            if args.sweep_tiles:
                points += sweep(layer, tokens, routing, args.sweep_tiles == "pairs", args.candidates)
                for point in sorted(points[1:], key=lambda p: p["us"]):
                    print(f"{'':<30}{point['us']:>9.1f}  x{chosen['us'] / point['us']:.2f}  {' '.join(point['tiles'])}")
            if args.out:
                with args.out.open("a") as file:
                    file.writelines(json.dumps({"label": args.label} | point) + "\n" for point in points)
        del layer
        torch.cuda.empty_cache()
    print_geomean(records, peers)
    print_skew(records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
