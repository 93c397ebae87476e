# SPDX-License-Identifier: Apache-2.0
"""A small run of every compiled kernel, for compute-sanitizer; checks nothing itself.

usage: PYTHONPATH=. compute-sanitizer --tool memcheck|racecheck --error-exitcode 1 --kernel-name kns=vllm_humming \\
           python3 tests/gpu/run_each_kernel.py [--few] [--dtypes bf16 fp16] [--formats mxfp4 nvfp4 mxfp4_fp8]
memcheck takes half a minute; for racecheck, which is far slower, --few runs every kernel on one or two batch sizes, and
one process a dtype and format may run beside the others. It needs --library with a build made by
NVCC_APPEND_FLAGS=-DVLLM_HUMMING_RACECHECK (csrc/moe/tile.cuh says why).
"""

import argparse
from itertools import product
from pathlib import Path

import torch
from check_gemm import (
    SIZES,
    Tokens,
    Weights,
    batched_workspace,
    gemm_workspace,
    launch_batched,
    launch_gemm,
    make_case,
    make_tokens,
    make_weights,
    make_x,
)
from layers import SPECS, Shape, batch, every_tile, launch, make_layer, selected_tiles, workspace_for

from benchmarks.routing import route
from vllm_humming import ops
from vllm_humming.moe import schedule
from vllm_humming.moe.layouts import GemmLayout
from vllm_humming.moe.weight_formats import WEIGHT_FORMATS, WeightFormat

TOKENS = (1, 37, 200)
QUANTISED = 1030  # tokens, enough for the quantisation of large batches
FEW = 9  # few entries: the GEMMs route by themselves
ROUTED = 520  # with top-8, enough rows for the routing of large batches
SORTED = 2100  # and for the sorting copy of large batches
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def run_grouped(dtype: torch.dtype, fmt: WeightFormat, few: bool) -> int:
    """Every layout, with and without groups, with every tile; returns how many calls."""
    n, k, rows, packed_k = SIZES[0]
    w, one = (make_weights(rows, packed_k, experts, fmt, dtype, "cuda", bias=True) for experts in (5, 1))
    calls = 0

    def call(w: Weights, t: Tokens, groups, row_list, shape, layout, tile) -> None:
        nonlocal calls
        out = torch.empty(shape, dtype=dtype, device="cuda")
        launch_gemm(w, t, groups, row_list, gemm_workspace(w, out[..., 0].numel(), k, layout), out, layout, tile)
        calls += 1

    for tile in schedule.tiles_of(fmt.path):
        widest = schedule.TILES[tile].widths[-1]
        sizes = [[0, widest + 3, 1, 9, 0]] if few else [[0, widest + 3, 1, 9, 0], [0, 0, 1, 0, 0], [0, 1100, 0, 2, 5]]
        for layout, counts in product(GemmLayout, sizes):
            case = make_case(layout, counts, n, k, "cuda", first=3)
            x = make_x(case.x, set(case.tokens), dtype, "cuda", 0)
            for scales in (None,) if fmt.path == "a16" else (None, "row-major", "M-major"):
                call(w, make_tokens(x, fmt, scales), case.groups, case.rows, case.out, layout, tile)
        for m in (5,) if few else (1, 5, widest + 3):
            x = make_x((m, k), set(range(m)), dtype, "cuda", 0)
            call(one, make_tokens(x, fmt, None), None, None, (m, n), GemmLayout.CONTIGUOUS, tile)
    return calls


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--few", action="store_true", help="one or two batch sizes, every tile with one activation only"
    )
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--formats", nargs="+", choices=list(WEIGHT_FORMATS), default=list(WEIGHT_FORMATS))
    parser.add_argument("--library", type=Path, help="kernels to load instead of the package's")
    args = parser.parse_args()
    few = args.few
    if args.library:
        ops.LIBRARY_PATH = args.library.resolve()
    thorough = ("silu",) if few else ("silu", "relu2")
    ops.load_kernels()
    gen = torch.Generator(device="cuda").manual_seed(0)
    runs = 0
    for dtype, fmt in product(args.dtypes, args.formats):
        for spec in SPECS:
            shape = Shape(160, 96, 3, 2, spec, bias=True)
            layer = make_layer(shape, DTYPES[dtype], "cuda", weight_format=WEIGHT_FORMATS[fmt])
            every = every_tile(layer)
            # The same tile for both: one kernel, where there is one. Others: one each.
            pairs = [(t, t) for t in every] + list(zip(every, every[1:] + every[:1], strict=True))
            pairs = pairs if spec in thorough else []
            sizes = (FEW, TOKENS[1]) if few else (FEW, *TOKENS)
            if spec == "silu" and layer.weight_format.path == "w4a8":
                sizes += (QUANTISED,)
            for tokens in sizes:
                x = batch(tokens, layer, gen)
                weights, ids = route(tokens, 3, 2, "uniform", gen)
                ids[::5, 0] = -1
                for tiles in (selected_tiles(layer, tokens), *(pairs if tokens in TOKENS else [])):
                    launch(layer, x, weights, ids, torch.empty_like(x), workspace_for(layer, tokens), tiles)
                    runs += 1
            for tiles in pairs:
                x = make_x((3, 40, 160), set(range(120)), DTYPES[dtype], "cuda", 0)
                counts = torch.tensor([0, 40, 17], dtype=torch.int32, device="cuda")
                launch_batched(layer, x, None, counts, batched_workspace(layer, 40), torch.empty_like(x), tiles)
                runs += 1
        runs += run_grouped(DTYPES[dtype], WEIGHT_FORMATS[fmt], few)
    layer = make_layer(Shape(96, 96, 40, 8), torch.bfloat16, "cuda")
    expert_map = torch.arange(40, dtype=torch.int32, device="cuda").sub_(3)
    for tokens, tiles in ((ROUTED, (0, 0)),) if few else ((ROUTED, (0, 0)), (SORTED, (6, 6))):
        x = batch(tokens, layer, gen)
        weights, ids = route(tokens, 40, 8, "zipf", gen)
        launch(layer, x, weights, ids, torch.empty_like(x), workspace_for(layer, tokens), tiles, expert_map)
        runs += 1
    torch.cuda.synchronize()
    print(f"{runs} calls ran")


if __name__ == "__main__":
    main()
