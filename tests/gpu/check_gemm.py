# SPDX-License-Identifier: Apache-2.0
"""Checks grouped_gemm and moe_batched on a GPU against float64; needs torch and the compiled kernels, not vLLM.

usage: PYTHONPATH=. python3 tests/gpu/check_gemm.py [--formats mxfp4 nvfp4 mxfp4_fp8] [--only GROUP ...] [--device cpu]
Prints one line a group with its worst relative Frobenius error, and every failure; exits 1 if there was one. Every
call runs twice on poisoned buffers, with tokens of no expert NaN; rows of no expert, guards and inputs must stay as
they are.
--device cpu runs the reference, to check this script itself.
"""

import argparse
import math
import sys
from dataclasses import dataclass
from itertools import accumulate, product

import torch
from layers import (
    GUARD_BYTES,
    SPECS,
    Layer,
    Shape,
    compare,
    guarded,
    launch,
    make_layer,
    oracle,
    padded_intermediate,
    quantized,
    random_weights,
    require,
    workspace_for,
)
from report import Report, run_groups
from torch import Tensor

from vllm_humming.moe import schedule
from vllm_humming.moe.layouts import GemmLayout, scales_m_major
from vllm_humming.moe.packing import PackedProjection, allocate, pack_expert
from vllm_humming.moe.quantize import dequantize
from vllm_humming.moe.weight_formats import WeightFormat

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
EXPERTS = 7
# (N of out, K of x, N and K of the packed weights): multiples of 8 that fill neither a block nor a chunk.
SIZES = [(136, 216, 136, 224), (72, 328, 200, 352), (736, 1856, 736, 1856)]
SCALE_LAYOUTS = ("row-major", "M-major")


@dataclass(frozen=True)
class Weights:
    weight_format: WeightFormat
    dtype: torch.dtype
    packed: PackedProjection
    dense: list[Tensor]  # float64 [n, k] an expert
    bias: list[Tensor] | None  # float32 [n]


@dataclass(frozen=True)
class Tokens:
    """x as the op takes it, its scales or None, and its values in float64, [.., K]."""

    x: Tensor
    scale: Tensor | None
    exact: Tensor


def make_weights(
    n: int, k: int, experts: int, fmt: WeightFormat, dtype: torch.dtype, device: str, bias: bool
) -> Weights:
    gen = torch.Generator(device=device).manual_seed(n + k)
    p = allocate(experts, n, k, gated=False, has_bias=bias, device=device, weight_format=fmt)
    dense, biases = [], []
    for expert in range(experts):
        q, own = random_weights(n, k, fmt, gen, 0)
        b = torch.randn(n, generator=gen, device=device) if bias else None
        pack_expert(p, expert, q.codes, q.scales, b, gated=False, dtype=dtype, layer="gemm", global_scale=own)
        dense.append(dequantize(q, fmt, torch.float64))
        biases.append(b)
    return Weights(fmt, dtype, p, dense, biases if bias else None)


def make_tokens(x: Tensor, fmt: WeightFormat, scales: str | None) -> Tokens:
    """scales: None for tokens of 16 bits, else one of SCALE_LAYOUTS for e4m3 ones."""
    if fmt.path == "a16":
        return Tokens(x, None, x.double())
    values, scale = quantized(x)
    exact = values.double() * scale.double().repeat_interleave(128, -1)[..., : x.shape[-1]]
    if scales is None:
        return Tokens(x, None, exact)
    if scales == "M-major":
        scale = scales_m_major(x.shape[:-1], x.shape[-1], x.device).copy_(scale)
    return Tokens(values, scale, exact)


def poisoned(size: int, device: torch.device) -> Tensor:
    """uint8 workspace of 0xFF, with a guard behind it that is not part of the view."""
    return torch.full((size + GUARD_BYTES,), 255, dtype=torch.uint8, device=device)[:size]


def check_guard(workspace: Tensor) -> None:
    tail = workspace.as_strided((GUARD_BYTES,), (1,), workspace.numel())
    require(bool(tail.eq(255).all()), "wrote behind the workspace")


def gemm_workspace(w: Weights, rows: int, k: int, layout: GemmLayout) -> Tensor:
    experts, code = w.packed.packed.shape[0], w.weight_format.code
    size = torch.ops.vllm_humming.grouped_gemm_workspace_bytes(rows, experts, k, code, layout)
    return poisoned(size, w.packed.packed.device)


def launch_gemm(
    w: Weights, t: Tokens, groups, rows, workspace: Tensor, out: Tensor, layout: GemmLayout, tile: int
) -> None:
    """One call of the op, nothing around it."""
    torch.ops.vllm_humming.grouped_gemm(
        t.x, t.scale, *w.packed.tensors, groups, rows, workspace, out, layout, w.weight_format.code, tile
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def run_gemm(w: Weights, t: Tokens, groups, rows, shape: tuple[int, ...], layout: GemmLayout, tile: int) -> Tensor:
    """The op's output [rows in all, N] after two runs, with guards and inputs checked; shape: of out."""
    inputs = [v for v in (t.x, t.scale, groups, rows) if v is not None]
    kept = [v.clone() for v in inputs]
    count, results = math.prod(shape[:-1]), []
    for _ in range(2):
        out = guarded(count, shape[-1], w.dtype, str(t.x.device))
        workspace = gemm_workspace(w, count, t.x.shape[-1], layout)
        launch_gemm(w, t, groups, rows, workspace, out[:count].view(shape), layout, tile)
        require(bool(out[count:].isnan().all()), "wrote behind out")
        check_guard(workspace)
        results.append(out[:count])
    require(all(same_bits(a, b) for a, b in zip(inputs, kept, strict=True)), "an input was written")
    require(same_bits(*results), "two runs differ")
    return results[0]


def compare_rows(w: Weights, out: Tensor, exact: Tensor, expert_of_row: list[int]) -> float:
    """Error of the rows that have an expert (exact: float64 [rows, K] of all); those that have none must be poison."""
    owner = torch.tensor(expert_of_row, device=out.device)
    require(bool(out[owner < 0].isnan().all()), "a row of no expert was written")
    n, k = out.shape[1], exact.shape[1]
    want = torch.zeros(out.shape, dtype=torch.float64, device=out.device)
    for expert in set(expert_of_row) - {-1}:
        mine = owner == expert
        want[mine] = exact[mine] @ w.dense[expert][:n, :k].T
        if w.bias is not None:
            want[mine] += w.bias[expert][:n].double()
    return compare(w, out[owner >= 0], want[owner >= 0])


def tiles_for(args: argparse.Namespace) -> list[int]:
    """The tiles of the format, one of them for the reference, which knows none."""
    tiles = schedule.tiles_of(args.format.path)
    return tiles[:1] if args.device == "cpu" else tiles


def int32(values: list[int], device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def counts_of(widest: int, kind: str) -> list[int]:
    """Rows of each expert: several full tiles and a rest beside exactly one tile; hardly any; more than quantisation
    takes one by one; none."""
    if kind == "many":
        return [0, 1, widest, 2 * widest + 3, 0, widest // 2 + 1, 7]
    return {"few": [0, 0, 1, 0, 0, 2, 0], "large": [0, 1101, 0, 7, 0, 33, 0], "none": [0] * EXPERTS}[kind]


@dataclass(frozen=True)
class Case:
    """groups and rows as the op takes them; expert and token of each result row (-1: none); shapes of x and out."""

    groups: Tensor | None
    rows: Tensor | None
    experts: list[int]
    tokens: list[int]
    x: tuple[int, ...]
    out: tuple[int, ...]


def make_case(layout: GemmLayout, counts: list[int], n: int, k: int, device: str, first: int = 0) -> Case:
    """first: rows ahead of the first expert's (offsets that do not start at 0)."""
    if layout is GemmLayout.MASKED:
        most = max(*counts, 4)
        experts = [e if i < c else -1 for e, c in enumerate(counts) for i in range(most)]
        tokens = [r if e >= 0 else -1 for r, e in enumerate(experts)]
        return Case(int32(counts, device), None, experts, tokens, (len(counts), most, k), (len(counts), most, n))
    offsets = [first, *accumulate(counts, initial=first)][1:]
    experts = [-1] * first + [e for e, c in enumerate(counts) for _ in range(c)] + [-1] * 5
    total = len(experts)
    if layout is GemmLayout.CONTIGUOUS:
        tokens = [r if e >= 0 else -1 for r, e in enumerate(experts)]
        return Case(int32(offsets, device), None, experts, tokens, (total, k), (total, n))
    m = total // 3 + 2  # tokens are used several times; the last one is not used
    tokens = [(r * 7 + 3) % (m - 1) if e >= 0 else -1 for r, e in enumerate(experts)]
    rows = int32([t if t >= 0 else 2**31 - 1 for t in tokens], device)  # past the groups: what no kernel may follow
    return Case(int32(offsets, device), rows, experts, tokens, (m, k), (total, n))


def make_x(shape: tuple[int, ...], used: set[int], dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """Random tokens, NaN where not used."""
    gen = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(shape, generator=gen, device=device).to(dtype)
    idle = [i for i in range(math.prod(shape[:-1])) if i not in used]
    x.view(-1, shape[-1])[idle] = math.nan
    return x


def check_case(w: Weights, layout: GemmLayout, case: Case, tile: int, scales: str | None) -> float:
    x = make_x(case.x, set(case.tokens), w.dtype, str(w.packed.packed.device), tile)
    t = make_tokens(x, w.weight_format, scales)
    out = run_gemm(w, t, case.groups, case.rows, case.out, layout, tile)
    exact = t.exact.flatten(0, -2)[torch.tensor(case.tokens, device=x.device).clamp(min=0)]
    if scales is not None:
        inside = make_tokens(x, w.weight_format, None)
        same = same_bits(out, run_gemm(w, inside, case.groups, case.rows, case.out, layout, tile))
        require(same, "given codes and scales differ from those made inside")
    return compare_rows(w, out, exact, case.experts)


def layouts_group(report: Report, args: argparse.Namespace) -> None:
    fmt, device = args.format, args.device
    sizes = SIZES[:1] if device == "cpu" else SIZES
    kinds = [None] if fmt.path == "a16" else [None, *SCALE_LAYOUTS]
    for layout in GemmLayout:
        report.begin(f"grouped {layout.name}")
        for (n, k, rows, packed_k), (name, dtype) in product(sizes, DTYPES.items()):
            w = make_weights(rows, packed_k, EXPERTS, fmt, dtype, device, bias=n != 72)
            amounts = ("many", "few", "none", "large") if n == SIZES[0][0] else ("many", "few")
            for tile, kind, scales in product(tiles_for(args), amounts, kinds):
                counts = counts_of(schedule.TILES[tile].widths[-1], kind)
                first = 6 if kind == "few" and layout is not GemmLayout.MASKED else 0
                case = make_case(layout, counts, n, k, device, first)
                label = f"{schedule.TILES[tile].name} {kind} N={n} {name} {scales or ''}"
                report.case(label, lambda w=w, c=case, t=tile, s=scales, lay=layout: check_case(w, lay, c, t, s))
        report.end()


def short_group(report: Report, args: argparse.Namespace) -> None:
    """Many small tiles of one to five blocks of K, fewer than a ring of stages: what runs ahead here runs tiles ahead
    (the two CTAs of a pair tile also of each other, where a tile's tokens are one box of 32: csrc/moe/pair/)."""
    fmt, device = args.format, args.device
    n = 256 if device == "cpu" else 8192  # the widest tiles: more of them than CTAs
    report.begin("short K, small tiles")
    for k in range(128, 768, 128):
        w = make_weights(n, k, EXPERTS, fmt, torch.bfloat16, device, bias=True)
        for tile, counts in product(tiles_for(args), ([1, 32, 9, 31, 2, 17, 25], [33, 1, 64, 2, 65, 3, 32])):
            case = make_case(GemmLayout.CONTIGUOUS, counts, n, k, device)
            label = f"{schedule.TILES[tile].name} K={k} {counts}"
            report.case(label, lambda w=w, c=case, t=tile: check_case(w, GemmLayout.CONTIGUOUS, c, t, None))
    report.end()


def plain_group(report: Report, args: argparse.Namespace) -> None:
    """One expert without groups, and the same rows as groups, bit for bit."""
    fmt, device = args.format, args.device

    def check(w: Weights, n: int, k: int, m: int, tile: int, scales: str | None) -> float:
        x = make_x((m, k), set(range(m)), w.dtype, device, m)
        t = make_tokens(x, fmt, scales)
        out = run_gemm(w, t, None, None, (m, n), GemmLayout.CONTIGUOUS, tile)
        listed = run_gemm(w, t, int32([0, m], device), None, (m, n), GemmLayout.CONTIGUOUS, tile)
        require(same_bits(out, listed), "with and without groups differ")
        return compare_rows(w, out, t.exact, [0] * m)

    report.begin("one expert, no groups")
    sizes = SIZES[:1] if device == "cpu" else [*SIZES, (9216, 512, 9216, 512)]  # the last: more tiles than CTAs
    for (n, k, rows, packed_k), (name, dtype) in product(sizes, DTYPES.items()):
        w = make_weights(rows, packed_k, 1, fmt, dtype, device, bias=True)
        for tile in tiles_for(args):
            widest = schedule.TILES[tile].widths[-1]
            for m in dict.fromkeys((1, 8, 9, widest, widest + 1, widest + widest // 2, 3 * widest + 5)):
                for scales in [None] if fmt.path == "a16" else [None, "M-major"]:
                    label = f"{schedule.TILES[tile].name} M={m} N={n} {name} {scales or ''}"
                    report.case(
                        label,
                        lambda w=w, n=n, k=k, m=m, t=tile, s=scales: check(w, n, k, m, t, s),
                    )
    report.end()


def batched_workspace(layer: Layer, most: int) -> Tensor:
    s = layer.shape
    size = torch.ops.vllm_humming.moe_batched_workspace_bytes(
        most, s.experts, s.hidden, padded_intermediate(layer), layer.weight_format.code
    )
    return poisoned(size, layer.w13.packed.device)


def launch_batched(layer: Layer, x: Tensor, scale, counts: Tensor, workspace: Tensor, out: Tensor, tiles) -> None:
    """One call of the op, nothing around it."""
    o = {"alpha": 1.0, "beta": 0.0, "limit": math.inf} | layer.options
    torch.ops.vllm_humming.moe_batched(
        x, scale, counts, *layer.w13.tensors, *layer.w2.tensors, workspace, out, layer.weight_format.code,
        int(o["activation"]), o["alpha"], o["beta"], o["limit"], *tiles,
    )  # fmt: skip


def run_batched(layer: Layer, x: Tensor, scale, counts: Tensor, tiles: tuple[int, int]) -> Tensor:
    """The op's output [E, max, H] after two runs, with guards checked."""
    count, results = x.shape[0] * x.shape[1], []
    for _ in range(2):
        out = guarded(count, x.shape[2], layer.dtype, str(x.device))
        workspace = batched_workspace(layer, x.shape[1])
        launch_batched(layer, x, scale, counts, workspace, out[:count].view(x.shape), tiles)
        require(bool(out[count:].isnan().all()), "wrote behind out")
        check_guard(workspace)
        results.append(out[:count].view(x.shape))
    require(same_bits(*results), "two runs differ")
    return results[0]


def check_batched(layer: Layer, counts: list[int], tiles: tuple[int, int]) -> float:
    """Against the layer on the same tokens, each with its expert as the only one; bit for bit where neither GEMM cuts
    an expert's rows, whose order in the layer is not fixed."""
    device, hidden, most = str(layer.w13.packed.device), layer.shape.hidden, max(*counts, 4)
    valid = torch.tensor([[i < c for i in range(most)] for c in counts], device=device)
    used = set(valid.flatten().nonzero()[:, 0].tolist())
    x = make_x((len(counts), most, hidden), used, layer.dtype, device, sum(counts))
    out = run_batched(layer, x, None, int32(counts, device), tiles)
    require(bool(out[~valid].isnan().all()), "a row of no expert was written")
    tokens = x[valid]
    ids = (
        torch.arange(len(counts), device=device, dtype=torch.int32)[:, None]
        .expand(-1, most)[valid][:, None]
        .contiguous()
    )
    ones = torch.ones(ids.shape, device=device)
    single = torch.empty_like(tokens)
    launch(layer, tokens, ones, ids, single, workspace_for(layer, len(tokens)), tiles)
    if max(counts) <= min(schedule.TILES[tile].widths[-1] for tile in tiles):
        require(same_bits(out[valid], single), "differs from the layer")
    if layer.weight_format.path == "w4a8":
        values, scale = quantized(x)
        for given in (scale, scales_m_major(x.shape[:-1], hidden, device).copy_(scale)):
            again = run_batched(layer, values, given, int32(counts, device), tiles)
            require(same_bits(again, out), "given codes and scales differ from those made inside")
    if not used:
        return 0.0
    return compare(layer, out[valid], oracle(layer, tokens, ones, ids, tiles=tiles))


def batched_group(report: Report, args: argparse.Namespace) -> None:
    report.begin("batched layer")
    tiles = tiles_for(args)
    for spec, (name, dtype) in product(SPECS, DTYPES.items()):
        layer = make_layer(Shape(352, 160, EXPERTS, 1, spec, bias=True), dtype, args.device, weight_format=args.format)
        pairs = [(t, t) for t in tiles] if spec in ("silu", "relu2") else [(tiles[0], tiles[-1]), (tiles[-1], tiles[0])]
        for pair in pairs:
            widest = min(schedule.TILES[tile].widths[-1] for tile in pair)
            for counts in (
                counts_of(widest, "many"),
                counts_of(widest, "few"),
                [widest, 0, 1, 9, 5, widest, 3],
                [0] * 7,
            ):
                case = f"{spec} {name} tiles {pair} counts {counts}"
                report.case(case, lambda layer=layer, c=counts, p=pair: check_batched(layer, c, p))
    report.end()


def captured(call) -> "torch.cuda.CUDAGraph":
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        call()
        after = torch.cuda.memory_stats()["allocation.all.allocated"]
    require(before == after, "allocated during capture")
    return graph


def replay_gemm(w: Weights, layout: GemmLayout, tile: int, scales: str | None) -> float:
    """Captures with some groups, replays with others and new tokens in the same tensors."""
    n, k, device = SIZES[0][0], SIZES[0][1], str(w.packed.packed.device)
    counts = counts_of(schedule.TILES[tile].widths[-1], "many")
    case, other = (make_case(layout, c, n, k, device) for c in (counts, counts[::-1]))
    # Not only used tokens: other rows are of other tokens.
    t, fresh = (
        make_tokens(make_x(case.x, set(range(10**4)), w.dtype, device, s), w.weight_format, scales) for s in (1, 2)
    )
    workspace = gemm_workspace(w, math.prod(case.out[:-1]), k, layout)
    out = torch.full(case.out, math.nan, dtype=w.dtype, device=device)
    graph = captured(lambda: launch_gemm(w, t, case.groups, case.rows, workspace, out, layout, tile))
    t.x.copy_(fresh.x), case.groups.copy_(other.groups), out.fill_(math.nan), workspace.fill_(255)
    if t.scale is not None:
        t.scale.copy_(fresh.scale)
    if case.rows is not None:
        case.rows.copy_(other.rows)
    graph.replay()
    replayed = out.view(-1, n).clone()
    eager = run_gemm(w, fresh, other.groups, other.rows, case.out, layout, tile)
    require(same_bits(replayed, eager), "replay differs from eager")
    exact = fresh.exact.flatten(0, -2)[torch.tensor(other.tokens, device=device).clamp(min=0)]
    return compare_rows(w, replayed, exact, other.experts)


def replay_batched(layer: Layer, tiles: tuple[int, int]) -> float:
    device, hidden = str(layer.w13.packed.device), layer.shape.hidden
    counts = [0, 33, 5, 48, 1, 0, 17]
    x, fresh = (make_x((EXPERTS, 48, hidden), set(range(EXPERTS * 48)), layer.dtype, device, s) for s in (1, 2))
    held, other = int32(counts, device), int32(counts[::-1], device)
    workspace, out = batched_workspace(layer, 48), torch.full_like(x, math.nan)
    graph = captured(lambda: launch_batched(layer, x, None, held, workspace, out, tiles))
    x.copy_(fresh), held.copy_(other), out.fill_(math.nan), workspace.fill_(255)
    graph.replay()
    require(same_bits(out, run_batched(layer, fresh, None, other, tiles)), "replay differs from eager")
    return 0.0


def graphs_group(report: Report, args: argparse.Namespace) -> None:
    if args.device == "cpu":
        return
    report.begin("graph replay equals eager")
    w = make_weights(*SIZES[0][2:], EXPERTS, args.format, torch.bfloat16, args.device, bias=True)
    layer = make_layer(Shape(352, 160, EXPERTS, 1), torch.bfloat16, args.device, weight_format=args.format)
    for tile in schedule.tiles_of(args.format.path):
        for layout, scales in product(GemmLayout, [None] if args.format.path == "a16" else [None, *SCALE_LAYOUTS]):
            label = f"{layout.name} {schedule.TILES[tile].name} {scales or ''}"
            report.case(label, lambda t=tile, lay=layout, s=scales: replay_gemm(w, lay, t, s))
        report.case(f"batched {schedule.TILES[tile].name}", lambda t=tile: replay_batched(layer, (t, t)))
    report.end()


def back_to_back_group(report: Report, args: argparse.Namespace) -> None:
    """Calls in one stream with nothing between, each reading what the one before wrote, while kernels start early."""
    if args.device == "cpu":
        return
    report.begin("chained calls")
    fmt, n = args.format, 256

    def check(w: Weights, m: int, tile: int, layout: GemmLayout | None) -> float:
        x = make_x((m, n), set(range(m)), w.dtype, args.device, m)
        groups = None if layout is None else int32([m] if layout is GemmLayout.MASKED else [0, m], args.device)
        rows = int32(list(range(m)), args.device) if layout is GemmLayout.INDEXED else None
        kind = layout or GemmLayout.CONTIGUOUS
        shape = (1, m, n) if layout is GemmLayout.MASKED else (m, n)
        workspace = gemm_workspace(w, m, n, kind)
        ends = []
        for pause in (False, True):
            buffers = [x.clone().view(shape), torch.empty_like(x).view(shape)]
            torch.cuda.synchronize()
            for step in range(12):
                t = Tokens(buffers[step % 2], None, x)
                launch_gemm(w, t, groups, rows, workspace, buffers[(step + 1) % 2], kind, tile)
                if pause:
                    torch.cuda.synchronize()
            ends.append(buffers[0])
        require(bool(ends[0].isfinite().all()), "not finite")
        require(same_bits(*ends), "calls in a row differ from calls one by one")
        return 0.0

    w = make_weights(n, n, 1, fmt, torch.bfloat16, args.device, bias=True)
    for tile, m, layout in product(schedule.tiles_of(fmt.path), (1, 33, 700), (None, *GemmLayout)):
        label = f"{schedule.TILES[tile].name} M={m} {layout.name if layout is not None else 'no groups'}"
        report.case(label, lambda t=tile, m=m, lay=layout: check(w, m, t, lay))
    report.end()


GROUPS = {
    "layouts": layouts_group,
    "short": short_group,
    "plain": plain_group,
    "batched": batched_group,
    "graphs": graphs_group,
    "chained": back_to_back_group,
}


if __name__ == "__main__":
    sys.exit(run_groups(__doc__, GROUPS))
