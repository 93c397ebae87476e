# SPDX-License-Identifier: Apache-2.0
"""grouped_gemm and moe_batched on CPU tensors: every layout, format and dtype against float64, and what is refused."""

import math

import pytest
import torch
from packed_layout import DTYPES
from test_reference import ACTIVATIONS, Layer, make_layer, run

import vllm_humming.ops  # noqa: F401  (defines the ops)
from vllm_humming.moe import fp8
from vllm_humming.moe.layouts import GemmLayout, scales_m_major
from vllm_humming.moe.packing import allocate, pack_expert
from vllm_humming.moe.quantize import Quantized, dequantize
from vllm_humming.moe.weight_formats import MXFP4_FP8, WEIGHT_FORMATS

EXPERTS, N, K = 4, 136, 288
COUNTS = [3, 0, 7, 2]
OFFSETS = [0, 3, 3, 10, 12]
# 16 bits: one rounding of fp32 sums; that of bfloat16 is 2^-9 at most, of float16 2^-12.
TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 5e-4}
E4M3 = torch.float8_e4m3fn


def weights_of(fmt, dtype, *, bias=True, experts=EXPERTS, n=N, k=K, seed=0):
    """(packed experts, float64 weights [E, n, k], biases [E, n])."""
    gen = torch.Generator().manual_seed(seed)
    p = allocate(experts, n, k, gated=False, has_bias=bias, device="cpu", weight_format=fmt)
    dense, biases = [], torch.randn(experts, n, generator=gen)
    for expert in range(experts):
        codes = torch.randint(0, 256, (n, k // 2), generator=gen, dtype=torch.uint8)
        low, high = (0x20, 0x40) if fmt.has_global else (118, 122)
        scales = torch.randint(low, high, (n, k // fmt.group_k), generator=gen, dtype=torch.uint8)
        factor = torch.tensor(2.0**-5) if fmt.has_global else None
        own = biases[expert] if bias else None
        pack_expert(p, expert, codes, scales, own, gated=False, dtype=dtype, layer="l", global_scale=factor)
        dense.append(dequantize(Quantized(codes, scales, factor), fmt, torch.float64))
    return p, torch.stack(dense), biases.double() if bias else torch.zeros(experts, n, dtype=torch.float64)


def tokens_of(shape, dtype, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def e4m3_tokens(x, m_major=False):
    """x [.., K] -> (e4m3 [.., K], scales in the layout asked for, float64 values)."""
    values, scales = fp8.quantize_activations(x.flatten(0, -2))
    values, scales = values.view_as(x.float()), scales.view(*x.shape[:-1], -1)
    exact = values.double() * scales.double().repeat_interleave(128, -1)[..., : x.shape[-1]]
    if m_major:
        scales = scales_m_major(x.shape[:-1], x.shape[-1], "cpu").copy_(scales)
    return values.to(E4M3), scales, exact


def gemm(x, x_scale, p, groups, rows, out, layout, tile=0, **changes):
    code = changes.pop("weight_format", p.weight_format.code)
    args = {
        "x": x, "x_scale": x_scale, "packed": p.packed, "row_scale": p.row_scale, "bias": p.bias, "groups": groups,
        "rows": rows, "workspace": torch.empty(0, dtype=torch.uint8), "out": out, "layout": int(layout),
        "weight_format": code, "tile": tile,
    } | changes  # fmt: skip
    torch.ops.vllm_humming.grouped_gemm(**args)
    return out


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def check(out, want, touched):
    """Rows of `touched` within rounding of want, all others still NaN."""
    assert bool(out[~touched].isnan().all())
    error = (out[touched].double() - want[touched]).norm() / want[touched].norm()
    assert error < TOLERANCE[out.dtype]


def expected(x, expert_of_row, dense, biases):
    """float64 [R, N]; rows of no expert (-1) are NaN."""
    want = torch.full((len(expert_of_row), dense.shape[1]), math.nan, dtype=torch.float64)
    for row, expert in enumerate(expert_of_row):
        if expert >= 0:
            want[row] = x[row] @ dense[expert].T + biases[expert]
    return want


def case(layout, fmt, dtype, tokens, m_major=False):
    """(x, x_scale, exact x of each result row, expert of each result row, groups, rows, out) of one call."""
    most = 7
    if layout is GemmLayout.MASKED:
        shape, groups, rows = (EXPERTS, most), int32(COUNTS), None
        experts = [e if i < COUNTS[e] else -1 for e in range(EXPERTS) for i in range(most)]
    else:
        shape = (6,) if layout is GemmLayout.INDEXED else (14,)
        groups = int32(OFFSETS)
        experts = [e for e in range(EXPERTS) for _ in range(COUNTS[e])] + [-1, -1]
        rows = int32([5, 0, 0, 3, 2, 1, 4, 5, 3, 3, 0, 2, -7, 99]) if layout is GemmLayout.INDEXED else None
    x = tokens_of((*shape, K), dtype)
    if layout is GemmLayout.MASKED:
        x[1], x[3, 2:] = math.nan, math.nan  # rows of no expert
    elif layout is GemmLayout.CONTIGUOUS:
        x[12:] = math.nan
    scale = None
    if tokens == "e4m3":
        x, scale, exact = e4m3_tokens(x, m_major)
    else:
        exact = fp8.round_activations(x.flatten(0, -2)) if fmt is MXFP4_FP8 else x.double()
    exact = exact.reshape(-1, K)
    if rows is not None:
        exact = exact[rows.clamp(0, 5).long()]
    out_shape = (EXPERTS, most, N) if layout is GemmLayout.MASKED else (14, N)
    return x, scale, exact, experts, groups, rows, torch.full(out_shape, math.nan, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", WEIGHT_FORMATS.values(), ids=WEIGHT_FORMATS)
@pytest.mark.parametrize("layout", GemmLayout)
@pytest.mark.parametrize("bias", [False, True])
def test_layouts(layout, fmt, dtype, bias):
    p, dense, biases = weights_of(fmt, dtype, bias=bias)
    x, scale, exact, experts, groups, rows, out = case(layout, fmt, dtype, "16bit")
    gemm(x, scale, p, groups, rows, out, layout)
    check(out.view(-1, N), expected(exact, experts, dense, biases), int32(experts) >= 0)


@pytest.mark.parametrize("m_major", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", GemmLayout)
def test_e4m3_tokens(layout, dtype, m_major):
    p, dense, biases = weights_of(MXFP4_FP8, dtype)
    x, scale, exact, experts, groups, rows, out = case(layout, MXFP4_FP8, dtype, "e4m3", m_major)
    assert scale.is_contiguous() != m_major
    gemm(x, scale, p, groups, rows, out, layout)
    check(out.view(-1, N), expected(exact, experts, dense, biases), int32(experts) >= 0)


def test_e4m3_tokens_give_what_quantising_inside_gives():
    p, _, _ = weights_of(MXFP4_FP8, torch.bfloat16, experts=1)
    x = tokens_of((9, K), torch.bfloat16)
    values, scale, _ = e4m3_tokens(x)
    inside, given = torch.empty(9, N, dtype=torch.bfloat16), torch.empty(9, N, dtype=torch.bfloat16)
    gemm(x, None, p, None, None, inside, GemmLayout.CONTIGUOUS)
    gemm(values, scale, p, None, None, given, GemmLayout.CONTIGUOUS)
    assert torch.equal(inside, given)


@pytest.mark.parametrize("fmt", WEIGHT_FORMATS.values(), ids=WEIGHT_FORMATS)
def test_one_expert_without_groups(fmt):
    p, dense, biases = weights_of(fmt, torch.float16, experts=1)
    x = tokens_of((5, K), torch.float16)
    out = gemm(x, None, p, None, None, torch.full((5, N), math.nan, dtype=x.dtype), GemmLayout.CONTIGUOUS)
    exact = fp8.round_activations(x) if fmt is MXFP4_FP8 else x.double()
    check(out, expected(exact, [0] * 5, dense, biases), torch.ones(5, dtype=torch.bool))


def test_offsets_may_start_and_end_anywhere():
    """A rank's share of the rows of all experts."""
    p, dense, biases = weights_of(WEIGHT_FORMATS["mxfp4"], torch.float16)
    x, out = tokens_of((14, K), torch.float16), torch.full((14, N), math.nan, dtype=torch.float16)
    gemm(x, None, p, int32([2, 5, 5, 9, 9]), None, out, GemmLayout.CONTIGUOUS)
    experts = [-1, -1, 0, 0, 0, 2, 2, 2, 2] + [-1] * 5
    check(out, expected(x.double(), experts, dense, biases), int32(experts) >= 0)


@pytest.mark.parametrize("layout", GemmLayout)
def test_no_rows(layout):
    p, _, _ = weights_of(WEIGHT_FORMATS["mxfp4"], torch.float16)
    masked = layout is GemmLayout.MASKED
    shape = (EXPERTS, 0) if masked else (0,)
    x, out = torch.empty(*shape, K, dtype=torch.float16), torch.empty(*shape, N, dtype=torch.float16)
    rows = int32([]) if layout is GemmLayout.INDEXED else None
    gemm(x, None, p, int32([0] * (EXPERTS if masked else EXPERTS + 1)), rows, out, layout)


def test_smaller_than_the_packed_weights():
    """K and N of the activations decide; the packed weights beyond are not read."""
    p, dense, _ = weights_of(WEIGHT_FORMATS["mxfp4"], torch.float16, experts=1, bias=False)
    x, out = tokens_of((3, 264), torch.float16), torch.empty(3, 72, dtype=torch.float16)
    gemm(x, None, p, None, None, out, GemmLayout.CONTIGUOUS)
    want = x.double() @ dense[0, :72, :264].T
    check(out, want, torch.ones(3, dtype=torch.bool))


REFUSALS = [
    ({"layout": 3}, "layout must be one of"),
    ({"weight_format": 9}, "weight_format must be one of"),
    ({"x": torch.zeros(14, K, dtype=torch.bfloat16)}, "takes x of out's dtype, torch.float16, and no x_scale"),
    ({"x_scale": torch.ones(14, 3)}, "no x_scale, found torch.float16 and an x_scale"),
    ({"out": torch.zeros(14, N)}, "out must be bfloat16 or float16"),
    ({"out": torch.zeros(13, N, dtype=torch.float16)}, "x has 14 rows and out 13"),
    ({"out": torch.zeros(14, 132, dtype=torch.float16)}, "multiples of 8, found 288 and 132"),
    ({"out": torch.zeros(14, 200, dtype=torch.float16)}, "N in 1..192"),
    ({"out": torch.zeros(N, 14, dtype=torch.float16).T}, "must be contiguous"),
    ({"x": torch.zeros(14, 392, dtype=torch.float16)}, "K must be in 257..384"),
    # 128 less than the packed K: tiles that copy rows whole would read behind their zeros.
    ({"x": torch.zeros(14, 256, dtype=torch.float16)}, "K must be in 257..384"),
    ({"rows": int32([0] * 14)}, "rows belong to the layout INDEXED"),
    ({"layout": 2}, "INDEXED needs rows"),
    ({"layout": 2, "rows": int32([0] * 13)}, r"rows must be contiguous int32 \(14,\)"),
    ({"layout": 2, "rows": int32([14] * 14)}, r"rows must be in 0\.\.13"),
    ({"layout": 1}, r"x must be \[4, max, K\]"),
    ({"groups": None}, "with one expert only, found CONTIGUOUS and 4 experts"),
    ({"groups": int32([0] * 4)}, r"groups must be contiguous int32 \(5,\)"),
    ({"groups": torch.zeros(5, dtype=torch.int64)}, r"groups must be contiguous int32 \(5,\)"),
    ({"groups": int32([0, 3, 2, 10, 12])}, "ascending offsets"),
    ({"groups": int32([0, 3, 3, 10, 15])}, r"in 0\.\.14"),
    ({"groups": int32([-1, 3, 3, 10, 12])}, r"in 0\.\.14"),
    ({"bias": torch.zeros(EXPERTS, 64)}, "bias must be float32"),
    ({"bias": torch.zeros(192, EXPERTS).T}, "bias must be float32 .* contiguous"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSALS)
def test_refusals(changes, message):
    p, _, _ = weights_of(WEIGHT_FORMATS["mxfp4"], torch.float16, bias=False)
    x, out = torch.zeros(14, K, dtype=torch.float16), torch.zeros(14, N, dtype=torch.float16)
    args = {"x": x, "x_scale": None, "groups": int32(OFFSETS), "rows": None, "out": out, "layout": 0} | changes
    with pytest.raises(ValueError, match=message):
        gemm(p=p, **args)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(3, K)}, "bfloat16, float16 or float8_e4m3fn, found torch.float32"),
        ({"x_scale": None}, "x_scale must be given"),
        ({"x": torch.zeros(3, K, dtype=torch.float16)}, "x_scale must be None"),
        ({"x_scale": torch.ones(3, 2)}, r"x_scale must be float32 \(3, 3\)"),
        ({"x_scale": torch.ones(3, 3, dtype=torch.float64)}, r"x_scale must be float32 \(3, 3\)"),
        ({"x": torch.zeros(3, 256).to(E4M3), "x_scale": torch.ones(3, 2)}, r"K must be in 257\.\.384"),
    ],
)
def test_refusals_of_fp8(changes, message):
    p, _, _ = weights_of(MXFP4_FP8, torch.float16, experts=1)
    args = {"x": torch.zeros(3, K).to(E4M3), "x_scale": torch.ones(3, 3)} | changes
    with pytest.raises(ValueError, match=message):
        gemm(**args, p=p, groups=None, rows=None, out=torch.zeros(3, N, dtype=torch.float16), layout=0)


def test_counts_beyond_the_rows_are_refused():
    p, _, _ = weights_of(WEIGHT_FORMATS["mxfp4"], torch.float16)
    x, out = torch.zeros(EXPERTS, 3, K, dtype=torch.float16), torch.zeros(EXPERTS, 3, N, dtype=torch.float16)
    for counts in ([0, 4, 1, 1], [0, -1, 1, 1]):
        with pytest.raises(ValueError, match=r"counts in 0\.\.3"):
            gemm(x, None, p, int32(counts), None, out, GemmLayout.MASKED)


def batched(layer, kw, x, x_scale, counts, out, **changes):
    args = {"x": x, "x_scale": x_scale, "counts": counts}
    for name, p in (("w13", layer.w13), ("w2", layer.w2)):
        args |= dict(zip((name, f"{name}_row_scale", f"{name}_bias"), p.tensors, strict=True))
    args |= {
        "workspace": torch.empty(0, dtype=torch.uint8), "out": out, "weight_format": layer.w2.weight_format.code,
        "activation": int(kw["activation"]), "alpha": kw.get("alpha", 1.0), "beta": kw.get("beta", 0.0),
        "limit": kw.get("limit", math.inf), "tile1": 0, "tile2": 0,
    }  # fmt: skip
    torch.ops.vllm_humming.moe_batched(**(args | changes))
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", WEIGHT_FORMATS.values(), ids=WEIGHT_FORMATS)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_batched_layer_is_the_layer_with_one_expert_a_token(name, fmt, dtype):
    kw = ACTIVATIONS[name]
    rows = 256 if kw["activation"].gated else 128
    layer = Layer(weights_of(fmt, dtype, n=rows, k=160)[0], weights_of(fmt, dtype, n=160, k=128, seed=1)[0], ())
    x = tokens_of((4, 7, 160), dtype)
    out = torch.full_like(x, math.nan)
    batched(layer, kw, x, None, int32(COUNTS), out)
    for expert, count in enumerate(COUNTS):
        assert bool(out[expert, count:].isnan().all())
        ids = torch.full((count, 1), expert, dtype=torch.int32)
        want = run(layer, x[expert, :count].contiguous(), torch.ones(count, 1), ids, **kw)
        assert torch.equal(out[expert, :count], want)


@pytest.mark.parametrize("m_major", [False, True])
def test_batched_layer_of_e4m3_tokens(m_major):
    kw = ACTIVATIONS["silu"]
    layer = make_layer(4, 160, 96, gated=kw["activation"].gated, bias=True, weight_format=MXFP4_FP8)
    x = tokens_of((4, 7, 160), torch.bfloat16)
    values, scale, _ = e4m3_tokens(x, m_major)
    inside = batched(layer, kw, x, None, int32(COUNTS), torch.zeros_like(x))
    given = batched(layer, kw, values, scale, int32(COUNTS), torch.zeros_like(x))
    assert torch.equal(inside, given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"counts": int32([1, 2, 3])}, r"counts must be contiguous int32 \(4,\)"),
        ({"counts": int32([8, 0, 0, 0])}, r"counts in 0\.\.7"),
        ({"activation": 3}, "activation must be 0, 1 or 2"),
        ({"out": torch.zeros(4, 6, 160, dtype=torch.bfloat16)}, r"x and out must be \[4, max, H\]"),
        ({"out": torch.zeros(4, 7, 160, dtype=torch.float16)}, "takes x of out's dtype"),
    ],
)
def test_refusals_of_the_batched_layer(changes, message):
    layer = make_layer(4, 160, 96)
    x = torch.zeros(4, 7, 160, dtype=torch.bfloat16)
    args = {"counts": int32(COUNTS), "out": torch.zeros_like(x)} | changes
    with pytest.raises(ValueError, match=message):
        batched(layer, {"activation": 0}, x, None, **args)


def test_schemas_write_workspace_and_out_only():
    for name in ("grouped_gemm", "moe_batched"):
        schema = getattr(torch.ops.vllm_humming, name).default._schema
        written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        assert written == ["workspace", "out"]
        assert len(schema.returns) == 0


def test_under_the_op_checks():
    p, _, _ = weights_of(MXFP4_FP8, torch.float16)
    x, scale, _, _, groups, rows, out = case(GemmLayout.MASKED, MXFP4_FP8, torch.float16, "16bit")
    x, out = x.nan_to_num_(), out.zero_()
    workspace = torch.empty(0, dtype=torch.uint8)
    args = (x, scale, *p.tensors, groups, rows, workspace, out, 1, 2, 0)
    torch.library.opcheck(torch.ops.vllm_humming.grouped_gemm.default, args)
    layer = make_layer(2, 160, 96)
    y = torch.zeros(2, 3, 160, dtype=torch.bfloat16)
    args = (y, None, int32([1, 3]), *layer.w13.tensors, *layer.w2.tensors, workspace, torch.zeros_like(y), 0, 0)
    torch.library.opcheck(torch.ops.vllm_humming.moe_batched.default, (*args, 1.0, 0.0, math.inf, 0, 0))
