# SPDX-License-Identifier: Apache-2.0
"""Checks the whole layer on a GPU against the float64 oracle; needs torch and the compiled kernels, not vLLM.

usage: PYTHONPATH=. python3 tests/gpu/check_layer.py [--quick] [--formats mxfp4 nvfp4 mxfp4_fp8] [--only GROUP ...]
           [--device cpu]
Prints one line a group with its worst relative Frobenius error, and every failure; exits 1 if there was one.
--device cpu runs the small cases on the reference, to check this script itself.
"""

import argparse
import sys
from itertools import product

import torch
from layers import (
    CHUNK_TOKENS,
    SPECS,
    Layer,
    Shape,
    batch,
    compare,
    every_tile,
    guarded,
    idle_tokens,
    launch,
    make_layer,
    oracle,
    padded_intermediate,
    quantized,
    quantized_rows,
    require,
    run,
    selected_tiles,
    workspace_for,
    workspace_parts,
)
from report import Report, run_groups

from benchmarks.routing import route
from vllm_humming.moe import schedule

SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8),
    "seed1": Shape(6144, 2048, 32, 8),
    "seed2": Shape(3584, 3072, 12, 8),
    "gpt-oss-20b": Shape(2880, 2880, 32, 4, "swigluoai", bias=True),
    "nemotron": Shape(2688, 1856, 16, 6, "relu2"),
    "odd": Shape(736, 96, 7, 3),
    "384 experts": Shape(256, 128, 384, 8),
    "one expert": Shape(96, 160, 1, 1),
}
SMALL = Shape(736, 96, 7, 3)
MIDDLE = Shape(1856, 736, 9, 4, bias=True)
TOKENS = [0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129]
TOKENS += [160, 161, 255, 256, 257, 500, 512, 1000, 1024, 1025, 4096]
QUICK_TOKENS = [0, 1, 8, 17, 65, 161, 513]
FEW_ENTRIES = 64  # kMostFewEntries in csrc/moe/params.h
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def some(x, weights, ids):
    ids[torch.rand(ids.shape, device=ids.device) < 0.3] = -1


def none(x, weights, ids):
    ids.fill_(-1), x.fill_(float("nan")), weights.fill_(float("nan"))


def beyond(x, weights, ids):
    ids[::2, 0] = 2**31 - 1
    ids[1::3, min(1, ids.shape[1] - 1)] = -(2**31)
    ids[::5, -1] = 1000


def check(layer: Layer, tokens: int, kind: str = "uniform", *, scale: float = 1.0, edit=None, **kw) -> float:
    """One batch against the oracle. edit(x, weights, ids) changes the batch in place first."""
    gen = torch.Generator(device=layer.w13.packed.device).manual_seed(tokens + 1)
    s = layer.shape
    x = batch(tokens, layer, gen, scale)
    experts = kw["expert_map"].numel() if kw.get("expert_map") is not None else s.experts
    weights, ids = route(tokens, experts, s.top_k, kind, gen)
    if edit is not None:
        edit(x, weights, ids)
    tiles = kw.pop("tiles", None)
    out = run(layer, x, weights, ids, tiles=tiles, **kw)
    # the oracle must not touch tokens that no expert sees: they may be NaN
    return compare(layer, out, oracle(layer, x, weights, ids, tiles=tiles, **kw))


def shapes_group(report: Report, args: argparse.Namespace) -> None:
    for name, shape in SHAPES.items():
        if args.device == "cpu" and name != "odd":
            continue
        for dtype_name, dtype in DTYPES.items():
            report.begin(f"{name} {dtype_name}")
            layer = make_layer(shape, dtype, args.device, weight_format=args.format)
            for m in QUICK_TOKENS if args.quick else TOKENS:
                report.case(f"M={m}", lambda m=m, layer=layer: check(layer, m))
            report.end()


def activations_group(report: Report, args: argparse.Namespace) -> None:
    report.begin("activations, biases")
    for spec in SPECS:
        for bias in (False, True):
            for dtype_name, dtype in DTYPES.items():
                layer = make_layer(Shape(736, 352, 5, 3, spec, bias), dtype, args.device, weight_format=args.format)
                for m in (1, 33, 200):
                    for scale in (1.0, 6.0):  # 6: most gates pass the limits
                        name = f"{spec} bias={int(bias)} {dtype_name} M={m} x{scale:g}"
                        report.case(name, lambda m=m, s=scale, layer=layer: check(layer, m, scale=s))
    report.end()


def row_scales_group(report: Report, args: argparse.Namespace) -> None:
    report.begin("row scales (large weights)")
    for spec in ("relu2", "silu"):
        for dtype_name, dtype in DTYPES.items():
            layer = make_layer(Shape(736, 160, 5, 3, spec), dtype, args.device, boost=9, weight_format=args.format)
            require(bool((layer.w13.row_scale != 1).any()), "this layer was meant to need row scales")
            for m in (1, 40):
                name = f"{spec} {dtype_name} M={m}"
                report.case(name, lambda m=m, layer=layer: check(layer, m, scale=2.0**-9))
    report.end()


def ids_group(report: Report, args: argparse.Namespace) -> None:
    report.begin("ids")
    device = args.device
    layers = [make_layer(s, torch.bfloat16, device, weight_format=args.format) for s in (SMALL, MIDDLE)]

    def one_slot(x, weights, ids):
        ids[len(ids) // 2, -1] = -1

    def padded(x, weights, ids):
        half = len(ids) // 2
        ids[half:], x[half:], weights[half:] = -1, float("nan"), float("nan")

    def same(x, weights, ids):
        ids[:] = ids[:, :1]

    edits = {"some -1": some, "all -1": none, "one -1": one_slot, "padded": padded, "equal": same, "beyond": beyond}
    sizes = (1, 16, 130) if args.quick or device == "cpu" else (1, 16, 130, 1000, 8192)
    for name, edit in edits.items():
        for m in sizes:
            for layer in layers:
                case = f"{name} M={m} H={layer.shape.hidden}"
                report.case(case, lambda m=m, edit=edit, layer=layer: check(layer, m, edit=edit))
    for layer in layers:
        e = layer.shape.experts
        maps = {
            "half": [i // 2 if i % 2 else -1 for i in range(2 * e)],
            "reversed": list(range(e - 1, -1, -1)),
            "none": [-1] * (2 * e),
            "tail": [-1] * e + list(range(e)),
        }
        for name, values in maps.items():
            expert_map = torch.tensor(values, dtype=torch.int32, device=device)
            for m in sizes:
                for edit_name, edit in (("", None), (" some -1", some), (" beyond", beyond)):
                    report.case(
                        f"map {name}{edit_name} M={m}",
                        lambda m=m, edit=edit, t=expert_map, layer=layer: check(layer, m, edit=edit, expert_map=t),
                    )
    report.end()


def router_weight_group(report: Report, args: argparse.Namespace) -> None:
    report.begin("router weight on input")
    for top_k in (1, 3):
        for spec in ("silu", "swigluoai", "relu2"):
            shape = Shape(736, 160, 5, top_k, spec, bias=True)
            layer = make_layer(shape, torch.bfloat16, args.device, weight_format=args.format)
            for m in (1, 33, 300):
                name = f"top-{top_k} {spec} M={m}"
                report.case(name, lambda m=m, layer=layer: check(layer, m, router_weight_on_input=True))
    report.end()


def check_nan(layer: Layer, tokens: int) -> float:
    """A token with a NaN gives NaN, whatever clamps the activation has, and disturbs no other token."""
    gen = torch.Generator(device=layer.w13.packed.device).manual_seed(tokens)
    x = batch(tokens, layer, gen)
    weights, ids = route(tokens, layer.shape.experts, layer.shape.top_k, "uniform", gen)
    x[1, 5] = float("nan")
    out = run(layer, x, weights, ids)
    require(bool(out[1].isnan().all()), "a NaN token gave numbers")
    rest = torch.arange(tokens, device=x.device) != 1
    x[1] = 0
    return compare(layer, out[rest], oracle(layer, x, weights, ids)[rest])


def nan_group(report: Report, args: argparse.Namespace) -> None:
    report.begin("NaN tokens")
    for spec in SPECS:
        layer = make_layer(Shape(736, 160, 5, 3, spec), torch.bfloat16, args.device, weight_format=args.format)
        for m in (2, 40, 400):
            report.case(f"{spec} M={m}", lambda m=m, layer=layer: check_nan(layer, m))
    report.end()


def routing_group(report: Report, args: argparse.Namespace) -> None:
    report.begin("skewed routing")

    def one_expert(x, weights, ids):
        ids[:] = 3

    shapes = [SMALL] if args.device == "cpu" else [SMALL, SHAPES["qwen3-30b-a3b"], SHAPES["seed2"]]
    for shape in shapes:
        layer = make_layer(shape, torch.bfloat16, args.device, weight_format=args.format)
        for m in (64, 1000) if args.quick or args.device == "cpu" else (9, 64, 257, 1000, 4096):
            for kind in ("zipf", "one-hot", "balanced"):
                report.case(f"{kind} M={m} H={shape.hidden}", lambda m=m, k=kind, layer=layer: check(layer, m, k))
            report.case(f"one expert M={m} H={shape.hidden}", lambda m=m, layer=layer: check(layer, m, edit=one_expert))
    report.end()


def tiles_group(report: Report, args: argparse.Namespace) -> None:
    report.begin("every tile in each GEMM")
    for shape in (SMALL, MIDDLE, Shape(2688, 1856, 4, 2, "relu2")):
        for dtype_name, dtype in DTYPES.items():
            layer = make_layer(shape, dtype, args.device, weight_format=args.format)
            for m in (1, 17, 600) if args.quick else (1, 7, 17, 65, 130, 600, 2049):
                chosen = selected_tiles(layer, m)
                pairs = [(t, chosen[1]) for t in every_tile(layer)]
                pairs += [(chosen[0], t) for t in every_tile(layer)]
                for pair in dict.fromkeys(pairs):
                    name = f"{pair} M={m} H={shape.hidden} {dtype_name}"
                    report.case(name, lambda m=m, p=pair, layer=layer: check(layer, m, tiles=p))
    report.end()


def few_group(report: Report, args: argparse.Namespace) -> None:
    report.begin("few entries")
    on_gpu = args.device != "cpu"

    def idle_token(x, weights, ids):
        ids[len(ids) // 2] = -1

    def hot(x, weights, ids):  # every token, and every slot of it
        ids.fill_(3)

    def pairs(x, weights, ids):
        ids[:, 1::2] = ids[:, : ids.shape[1] // 2 * 2 : 2]

    edits = {"": None, "some -1": some, "all -1": none, "beyond": beyond}
    edits |= {"idle": idle_token, "hot": hot, "pairs": pairs}
    # Intermediate sizes for which all, or only some, of the batches of up to 64 entries have few up tiles.
    kinds = ((1, "silu", 160), (3, "relu2", 160), (8, "swigluoai", 992), (22, "gelu_tanh", 480), (4, "silu", 3072))
    half = torch.tensor([i // 2 if i % 2 else -1 for i in range(48)], dtype=torch.int32, device=args.device)
    elsewhere = torch.full((48,), -1, dtype=torch.int32, device=args.device)
    paths, turn = set(), 0
    for (top_k, spec, intermediate), dtype in product(kinds if on_gpu else kinds[1:2], DTYPES.values()):
        shape = Shape(736, intermediate, 24, top_k, spec, bias=True)
        layer = make_layer(shape, dtype, args.device, weight_format=args.format)
        tiles = every_tile(layer)
        if layer.weight_format.path == "a16":
            # Those that few entries run on, one that makes them wait for a routing kernel, and a kernel for each GEMM.
            few = [tile for tile in tiles if not schedule.TILES[tile].sorted_tokens]
            apart = tuple(tile for tile in few if schedule.TILES[tile].few_apart)
            tile_pairs = [*((tile, tile) for tile in (*few, schedule.tile_named("128x48"))), apart]
        else:
            tile_pairs = [(tiles[0], tiles[0]), (tiles[1], tiles[1]), (tiles[2], tiles[2]), (tiles[0], tiles[1])]
        most = FEW_ENTRIES // top_k
        thorough = on_gpu and dtype == torch.bfloat16
        for m in sorted({1, 2, most // 2, most, most + 1}) if thorough else sorted({2, most}) if on_gpu else (most,):
            for pair in tile_pairs if thorough else ():
                name = f"top-{top_k} M={m} {pair} {dtype} who routes"
                report.case(name, lambda m=m, p=pair, layer=layer: who_routes(layer, m, p, paths))
            for edit_name, edit in edits.items():
                pair = tile_pairs[turn % len(tile_pairs)]
                name, case = f"top-{top_k} M={m} {pair} {dtype} {edit_name}", {"edit": edit, "tiles": pair}
                if turn // len(tile_pairs) % 2 or not on_gpu:  # the turns shift against the 7 edits
                    mapped = case | {"expert_map": half if turn // (2 * len(tile_pairs)) % 2 else None}
                    report.case(f"{name} {turn}", lambda m=m, c=mapped, layer=layer: check(layer, m, **c))
                if on_gpu and m * top_k <= FEW_ENTRIES:
                    report.case(f"{name} as in many", lambda m=m, c=case, layer=layer: as_in_many(layer, m, **c))
                turn += 1
            none_here = {"tiles": tile_pairs[turn % len(tile_pairs)], "expert_map": elsewhere}
            report.case(f"top-{top_k} M={m} elsewhere", lambda m=m, c=none_here, layer=layer: check(layer, m, **c))
            on_input = {"tiles": tile_pairs[turn % len(tile_pairs)], "router_weight_on_input": True}
            report.case(f"top-{top_k} M={m} on input", lambda m=m, c=on_input, layer=layer: check(layer, m, **c))
    if on_gpu:
        report.case("both paths", lambda: require_paths(paths, args.format.path))
        report.case("one after the other", lambda: one_after_the_other(args))
    report.end()


def who_routes(layer: Layer, tokens: int, tiles: tuple[int, int], paths: set[bool]) -> float:
    """The GEMMs route by themselves exactly where csrc/moe/layer.cpp should say so; adds to paths whether they did.
    Told by the row list in the workspace: only a routing kernel writes one."""
    gen = torch.Generator(device=layer.w13.packed.device).manual_seed(tokens)
    s, (up, down) = layer.shape, (schedule.TILES[t] for t in tiles)
    entries = tokens * s.top_k
    x, workspace = batch(tokens, layer, gen), workspace_for(layer, tokens)
    launch(layer, x, *route(tokens, s.experts, s.top_k, "uniform", gen), torch.empty_like(x), workspace, tiles)
    slots = workspace_parts(layer, workspace, entries)[4].view(torch.int32)
    few = not bool((slots != -1).any())  # poison is -1
    require(few or bool((slots >= 0).all()), "a row list with gaps")
    up_rows = padded_intermediate(layer) * (2 if layer.options["activation"].gated else 1)
    apart = up.few_apart and down.few_apart and schedule.few_apart(entries, up_rows, tiles[0])
    gathers = layer.weight_format.path == "a16" and (up.widths[-1] <= schedule.MOST_GATHERED if up == down else apart)
    want = gathers and entries <= FEW_ENTRIES
    require(few == want, f"routed by {'the GEMMs' if few else 'a kernel'}: {entries} entries, tiles {tiles}")
    paths.add(few)
    return 0.0


def require_paths(paths: set[bool], path: str) -> float:
    """The cases reached both sides of the rule (with FP8 activations there is one)."""
    require(paths == ({False, True} if path == "a16" else {False}), f"only {paths} of both paths were run")
    return 0.0


def as_in_many(layer: Layer, tokens: int, *, edit, tiles: tuple[int, int]) -> float:
    """Few entries give the bits that they give in front of tokens without experts, where there are more than few and
    a kernel routes."""
    gen = torch.Generator(device=layer.w13.packed.device).manual_seed(tokens)
    s = layer.shape
    many = FEW_ENTRIES // s.top_k + 1
    x = batch(many, layer, gen)
    weights, ids = route(many, s.experts, s.top_k, "zipf", gen)
    ids[tokens:] = -1
    if edit is not None:
        edit(x[:tokens], weights[:tokens], ids[:tokens])
    few = run(layer, x[:tokens], weights[:tokens], ids[:tokens], tiles=tiles)
    reference = run(layer, x, weights, ids, tiles=tiles)[:tokens]
    require(torch.equal(few.view(torch.int16), reference.view(torch.int16)), "other bits than in a larger batch")
    return 0.0


def repeats_group(report: Report, args: argparse.Namespace) -> None:
    """Down tiles wait for what other CTAs store in the same kernel: the same bits in every one of many replays, with
    more tiles than run at once and with fewer."""
    report.begin("many replays")
    shapes = (Shape(2048, 768, 32, 8), Shape(2880, 736, 8, 4, bias=True), Shape(512, 2048, 64, 8, "relu2"))
    for shape in shapes if args.device != "cpu" else ():
        layer = make_layer(shape, torch.bfloat16, args.device, weight_format=args.format)
        for tile, m in product(every_tile(layer), (1, 8, 40, 120)):
            case = f"{schedule.TILES[tile].name} M={m} H={shape.hidden}"
            report.case(case, lambda m=m, tile=tile, layer=layer: many_replays(layer, m, (tile, tile)))
    report.end()


def many_replays(layer: Layer, tokens: int, tiles: tuple[int, int], times: int = 100) -> float:
    gen = torch.Generator(device=layer.w13.packed.device).manual_seed(tokens)
    x, workspace = batch(tokens, layer, gen), workspace_for(layer, tokens)
    weights, ids = route(tokens, layer.shape.experts, layer.shape.top_k, "uniform", gen)
    first = run(layer, x, weights, ids, tiles=tiles)
    outs = [torch.empty_like(x) for _ in range(4)]

    def replay() -> None:  # one behind the other, in one workspace
        for out in outs:
            launch(layer, x, weights, ids, out, workspace, tiles)

    replay()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replay()
    for _ in range(times):
        for out in outs:
            out.fill_(float("nan"))
        workspace.fill_(255)
        graph.replay()
        for out in outs:
            require(torch.equal(out.view(torch.int16), first.view(torch.int16)), "other bits in a replay")
    return 0.0


def one_after_the_other(args: argparse.Namespace) -> float:
    """Layers of unlike sizes share a workspace, each starting before the one ahead has ended; so do replays of all of
    them with other ids. Every one must give the bits that it gives alone."""
    shapes = (Shape(2048, 768, 32, 8), MIDDLE, Shape(2880, 2880, 8, 4, "swigluoai", bias=True), Shape(736, 96, 40, 22))
    layers = [make_layer(s, torch.bfloat16, args.device, weight_format=args.format) for s in shapes]
    gen = torch.Generator(device=args.device).manual_seed(0)
    largest = 80
    workspace = max((workspace_for(layer, largest) for layer in layers), key=torch.Tensor.numel)
    calls = []
    for m in (1, 2, 8, 1, largest, 1, 4, 1):  # `largest` has more than few entries
        for layer in layers:
            x = batch(m, layer, gen)
            weights, ids = route(m, layer.shape.experts, layer.shape.top_k, "uniform", gen)
            calls.append((layer, x, weights, ids, torch.empty_like(x), workspace, selected_tiles(layer, m)))

    def run_all() -> None:
        for call in calls:
            launch(*call)

    run_all()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_all()
    for replay in range(4 if args.quick else 10):
        for layer, x, weights, ids, out, *_ in calls:
            fresh = route(len(x), layer.shape.experts, layer.shape.top_k, "zipf", gen)
            weights.copy_(fresh[0]), ids.copy_(fresh[1])
            if replay % 3 == 1:
                ids[torch.rand(ids.shape, generator=gen, device=ids.device) < 0.5] = -1
            out.fill_(float("nan"))
        workspace.fill_(255 if replay % 2 else 0)
        graph.replay()
        for i, (layer, x, weights, ids, out, _, tiles) in enumerate(calls):
            alone = run(layer, x, weights, ids, tiles=tiles)
            same = torch.equal(out.view(torch.int16), alone.view(torch.int16))
            require(same, f"replay {replay}, call {i}, M={len(x)} H={x.shape[1]}: other bits than alone")
    return 0.0


def large_group(report: Report, args: argparse.Namespace) -> None:
    if args.device == "cpu" or args.quick:
        return
    report.begin("large batches")
    layer = make_layer(Shape(2048, 768, 16, 8), torch.bfloat16, args.device, weight_format=args.format)
    for m in (16383, 16385, 40000, 131072):
        for kind in ("uniform", "one-hot"):
            report.case(f"M={m} {kind}", lambda m=m, k=kind: check(layer, m, k))

    expert_map = torch.arange(16, dtype=torch.int32, device=args.device).sub_(4)
    for m in (3000, 40000):
        report.case(f"M={m} map, some -1", lambda m=m: check(layer, m, edit=some, expert_map=expert_map))
    report.end()


def quantized_group(report: Report, args: argparse.Namespace) -> None:
    """By tokens, one load a thread up to 1024 CTAs: 1024 tokens of H 2048, 512 of 2880, 341 of 6144. Routing by one CTA
    up to 4096 entries."""
    if args.device == "cpu" or args.format.path != "w4a8":
        return
    report.begin("quantised rows, bitwise")
    shapes = [Shape(736, 96, 7, 3), Shape(96, 128, 9, 1), Shape(2880, 128, 8, 4), Shape(2048, 128, 16, 8)]
    shapes += [Shape(6144, 128, 9, 8), Shape(8320, 128, 5, 4), Shape(384, 128, 40, 20)]
    sizes = [2, 3, 17, 341, 342, 512, 513, 1024, 1025] + [4097, CHUNK_TOKENS + 999, 2 * CHUNK_TOKENS] * (not args.quick)
    for shape in shapes:
        for dtype_name, dtype in DTYPES.items():
            layer = make_layer(shape, dtype, args.device, weight_format=args.format)
            half = torch.arange(2 * shape.experts, dtype=torch.int32, device=args.device) - shape.experts // 2
            for m in sizes if shape.hidden < 6144 or dtype is torch.bfloat16 else sizes[:9]:
                for map_name, expert_map in (("", None), (" map", half)):
                    name = f"H={shape.hidden} top-{shape.top_k} {dtype_name} M={m}{map_name}"
                    report.case(name, lambda m=m, t=expert_map, layer=layer: check_quantized(layer, m, t))
    report.end()


def check_quantized(layer: Layer, tokens: int, expert_map: torch.Tensor | None) -> float:
    """Every row of the last chunk is its token's codes and scales, and every slot with an expert has one row."""
    s, device = layer.shape, layer.w13.packed.device
    gen = torch.Generator(device=device).manual_seed(tokens)
    x = batch(tokens, layer, gen)
    x[1::7] *= 2.0**-9
    x[::5, :128] = 0
    x[::3, -1] *= 100
    experts = s.experts if expert_map is None else expert_map.numel()
    weights, ids = route(tokens, experts, s.top_k, "zipf", gen)
    first = (tokens - 1) // CHUNK_TOKENS * CHUNK_TOKENS
    idle = idle_tokens(tokens - first, s.hidden)
    ids[torch.rand(ids.shape, generator=gen, device=device) < 0.1] = -1
    ids[first : first + idle] = -1
    mine = ids[first:].long()
    local = mine if expert_map is None else torch.where(mine < 0, -1, expert_map[mine.clamp(min=0)].long())
    wanted = ((local >= 0) & (local < s.experts)).flatten().nonzero().flatten()
    require(tokens < 17 or len(wanted) > 0, "no slot has an expert")
    slots, codes, scales = quantized_rows(
        layer, x, weights, ids, selected_tiles(layer, tokens), expert_map, len(wanted)
    )
    require(torch.equal(slots.long().sort().values, wanted), "rows are not the slots that have an expert")
    token = first + slots.long() // s.top_k
    want, want_scales = quantized(x[token])
    require(torch.equal(scales.contiguous().view(torch.int32), want_scales.view(torch.int32)), "scales differ")
    require(torch.equal(codes[:, : s.hidden].view(torch.uint8), want.view(torch.uint8)), "codes differ")
    require(bool((codes[:, s.hidden :].view(torch.uint8) == 0).all()), "padding is not zero")
    return 0.0


def graphs_group(report: Report, args: argparse.Namespace) -> None:
    if args.device == "cpu":
        return
    report.begin("graph replay equals eager")
    for shape in (MIDDLE, SHAPES["qwen3-30b-a3b"], SHAPES["gpt-oss-20b"]):
        layer = make_layer(shape, torch.bfloat16, args.device, weight_format=args.format)
        report.case(f"H={shape.hidden}", lambda layer=layer: replay_equals_eager(layer, args.quick))
    report.end()


def replay_equals_eager(layer: Layer, quick: bool) -> float:
    """Captures at many sizes, runs a large batch in the same workspace, and replays all on new inputs."""
    s, device, largest = layer.shape, layer.w13.packed.device, 8192
    gen = torch.Generator(device=device).manual_seed(0)
    workspace = workspace_for(layer, largest)
    x = batch(largest, layer, gen)
    weights, ids = route(largest, s.experts, s.top_k, "uniform", gen)
    sizes = [1, 2, 4, 8, 16, 24, 64, 512] if quick else [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), 1024]
    graphs = {}
    for m in sizes:
        out = guarded(m, s.hidden, layer.dtype, device)
        args = (layer, x[:m], weights[:m], ids[:m], out[:m], workspace, selected_tiles(layer, m))
        launch(*args)  # the engine warms every size up too
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            launch(*args)
            after = torch.cuda.memory_stats()["allocation.all.allocated"]
        require(before == after, f"M={m}: allocated during capture")
        graphs[m] = (graph, out)
    large = guarded(largest, s.hidden, layer.dtype, device)
    launch(layer, x, weights, ids, large[:largest], workspace, selected_tiles(layer, largest))
    worst = compare(layer, large[:largest], oracle(layer, x, weights, ids))
    x.copy_(torch.randn(x.shape, generator=gen, device=device))
    fresh = route(largest, s.experts, s.top_k, "zipf", gen)
    weights.copy_(fresh[0]), ids.copy_(fresh[1])
    ids[::7, 1] = -1
    for m, (graph, out) in reversed(graphs.items()):
        out.fill_(float("nan")), workspace.fill_(255)
        graph.replay()
        eager = run(layer, x[:m], weights[:m], ids[:m])
        require(torch.equal(out[:m].view(torch.int16), eager.view(torch.int16)), f"M={m}: replay differs from eager")
        require(bool(out[m:].isnan().all()), f"M={m}: replay wrote behind out")
        worst = max(worst, compare(layer, eager, oracle(layer, x[:m], weights[:m], ids[:m])))
    return worst


def moved_group(report: Report, args: argparse.Namespace) -> None:
    report.begin("experts moved in place")
    shapes = [SMALL, MIDDLE] if args.device == "cpu" else [SMALL, MIDDLE, SHAPES["qwen3-30b-a3b"]]
    for shape in shapes:
        for m in (1, 33) if args.quick or args.device == "cpu" else (1, 33, 300, 4096):
            layer = make_layer(shape, torch.bfloat16, args.device, weight_format=args.format)
            report.case(f"M={m} H={shape.hidden}", lambda m=m, layer=layer: moved_equals(layer, m))
    report.end()


def moved_equals(layer: Layer, tokens: int) -> float:
    """As expert load balancing does it: every tensor's experts change places, ids follow, and the bits stay, also those
    of a graph that was captured before."""
    s, device = layer.shape, layer.w13.packed.device
    gen = torch.Generator(device=device).manual_seed(tokens)
    x = batch(tokens, layer, gen)
    weights, ids = route(tokens, s.experts, s.top_k, "uniform", gen)
    before, graph = run(layer, x, weights, ids), None
    if x.is_cuda:
        out = guarded(tokens, s.hidden, layer.dtype, device)[:tokens]
        args = (layer, x, weights, ids, out, workspace_for(layer, tokens), selected_tiles(layer, tokens))
        launch(*args)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch(*args)
    order = torch.arange(s.experts, device=device).roll(1)  # slot i holds expert order[i]; none stays where it was
    for tensor in (*layer.w13.tensors, *layer.w2.tensors):
        if tensor is not None:
            tensor.copy_(tensor[order])
    stale = run(layer, x, weights, ids)
    require(not torch.equal(stale, before), "the experts did not move")
    ids.copy_(order.argsort()[ids.long()])
    after = run(layer, x, weights, ids)
    require(torch.equal(after.view(torch.int16), before.view(torch.int16)), "moved experts give other bits")
    if graph is not None:
        out.fill_(float("nan"))
        graph.replay()
        require(torch.equal(out.view(torch.int16), before.view(torch.int16)), "a graph from before the move differs")
    return 0.0


GROUPS = {
    "shapes": shapes_group,
    "activations": activations_group,
    "row-scales": row_scales_group,
    "ids": ids_group,
    "router-weight": router_weight_group,
    "nan": nan_group,
    "routing": routing_group,
    "tiles": tiles_group,
    "few": few_group,
    "repeats": repeats_group,
    "large": large_group,
    "quantized": quantized_group,
    "graphs": graphs_group,
    "moved": moved_group,
}


if __name__ == "__main__":
    sys.exit(run_groups(__doc__, GROUPS, quick="fewer sizes, about a fifth of the time"))
