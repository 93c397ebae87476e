# SPDX-License-Identifier: Apache-2.0
"""MXFP4 weights for FP8 activations: the container, rows that e4m3 does not hold, the quantiser, the layer."""

import math
import random
import subprocess
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from packed_layout import DTYPES, E4M3, ORDERS, decode_e4m3_chunk, packed_row
from plain_gemm import plain_gemm
from test_reference import ACTIVATIONS, SILU, error, make_inputs, make_layer, run

from vllm_humming.moe import fp8
from vllm_humming.moe.packing import allocate, pack_expert, unpack_expert
from vllm_humming.moe.quantize import dequantize_mxfp4
from vllm_humming.moe.reference import oracle_moe, oracle_moe_fp8
from vllm_humming.moe.weight_formats import MXFP4_FP8

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FP8 = {"weight_format": MXFP4_FP8}
# Relative Frobenius errors against the oracle with activations quantised: 2.5e-3 and 4e-4 were seen.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 1.5e-3}


def pack(codes, scales, *, gated=False, gate_up="packed", dtype=torch.bfloat16, bias=None):
    """(the packed projection of one expert, what was rounded)."""
    n, k = codes.shape[0], codes.shape[1] * 2
    p = allocate(1, n, k, gated=gated, has_bias=bias is not None, device="cpu", **FP8)
    return p, pack_expert(p, 0, codes, scales, bias, gated=gated, gate_up=gate_up, dtype=dtype, layer="l")


def unpacked(p, n, k, gated=False):
    make = {"dtype": torch.bfloat16, "gated": gated, "out_dtype": torch.float64}
    return unpack_expert(p, 0, k=k, out_features=n, **make)[0]


def within_the_window(n, k, seed):
    """Random codes; each row's scales anywhere in the 2^11 below a random top, which the first group has."""
    gen = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (n, k // 2), generator=gen, dtype=torch.uint8)
    codes[:, 0] |= 0x11
    top = torch.randint(11, 255, (n, 1), generator=gen)
    below = torch.randint(0, 12, (n, k // 32), generator=gen)
    below[:, 0] = 0
    return codes, (top - below).to(torch.uint8)


# The container


@pytest.mark.parametrize(("gated", "gate_up"), ORDERS)
def test_threads_decode_every_code_at_every_exponent(gated, gate_up):
    codes = torch.arange(32).remainder(16).roll(5)
    codes = (codes[0::2] | codes[1::2] << 4).to(torch.uint8).repeat(64, 4)
    # Row r: its top group in place r % 4, the next one r % 12 below, two more around.
    scales = torch.zeros(64, 4, dtype=torch.uint8)
    for row in range(64):
        for place, below in enumerate((0, row % 12, 11 - row % 12, row // 6)):
            scales[row, (row + place) % 4] = 120 + row - below
    p, rounding = pack(codes, scales, gated=gated, gate_up=gate_up)
    assert rounding == fp8.Rounding(0, 256, 0.0)
    chunks = {}
    for row in range(64):
        block, place = packed_row(row, 64, gated, gate_up)
        if block not in chunks:
            chunks[block] = decode_e4m3_chunk(p.packed[0, block, 0].tolist())
        scale = p.row_scale[0, 64 * block + place].item()
        assert scale == 2.0 ** (120 + row - 127 - 6)
        for k in range(128):
            byte = int(codes[row, k // 2])
            code = byte >> 4 if k % 2 else byte & 15
            want = math.ldexp(E2M1[code & 7], int(scales[row, k // 32]) - 127) * (-1 if code & 8 else 1)
            got = chunks[block][place, k] * scale
            assert got == want
            assert math.copysign(1, got) == math.copysign(1, want)


@pytest.mark.parametrize(("gated", "gate_up"), ORDERS)
@pytest.mark.parametrize(("n", "k"), [(2880, 2880), (1856, 736)])
def test_threads_decode_sampled_chunks_of_odd_sizes(gated, gate_up, n, k):
    codes, scales = within_the_window(n, k, seed=n)
    p, _ = pack(codes, scales, gated=gated, gate_up=gate_up)
    dense = dequantize_mxfp4(codes, scales, torch.float64)
    by_place = {packed_row(row, n, gated, gate_up): row for row in range(n)}
    blocks, chunks = p.packed.shape[1:3]
    pick = random.Random(k).randrange
    for block, chunk in [(pick(blocks), pick(chunks)), (blocks - 1, chunks - 1)]:
        for (place, column), value in decode_e4m3_chunk(p.packed[0, block, chunk].tolist()).items():
            row, column = by_place.get((block, place)), chunk * 128 + column
            want = dense[row, column].item() if row is not None and column < k else 0.0
            assert value * p.row_scale[0, block * 64 + place].item() == want


@pytest.mark.parametrize(("gated", "gate_up"), ORDERS)
@pytest.mark.parametrize(("n", "k"), [(64, 128), (192, 96), (736, 1856)])
def test_round_trip_is_exact_and_one_for_both_dtypes(gated, gate_up, n, k):
    codes, scales = within_the_window(n, k, seed=k)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(n))
    p, rounding = pack(codes, scales, gated=gated, gate_up=gate_up, bias=bias)
    assert rounding == fp8.Rounding(0, n * k // 32, 0.0)
    dense = dequantize_mxfp4(codes, scales, torch.float64)
    if gate_up == "interleaved":
        dense, bias = torch.cat([dense[0::2], dense[1::2]]), torch.cat([bias[0::2], bias[1::2]])
    assert torch.equal(unpacked(p, n, k, gated), dense)
    columns, rows = p.packed.shape[2] * 128, p.row_scale.shape[1]
    assert unpacked(p, rows, columns, gated).count_nonzero() == dense.count_nonzero()
    other, _ = pack(codes, scales, gated=gated, gate_up=gate_up, dtype=torch.float16, bias=torch.zeros(n))
    assert torch.equal(other.packed, p.packed)
    assert torch.equal(other.row_scale, p.row_scale)


# Rows that e4m3 does not hold


def row_of(*groups):
    """One row, 63 zero ones and its scales: groups of (codes for the first weights, scale byte)."""
    codes, scales = torch.zeros(64, 128, dtype=torch.uint8), torch.full((64, 4), 127, dtype=torch.uint8)
    for place, (values, scale) in enumerate(groups):
        codes[0, 32 * place : 32 * place + len(values)] = torch.tensor(values, dtype=torch.uint8)
        scales[0, place] = scale
    return codes[:, 0::2] | codes[:, 1::2] << 4, scales


@pytest.mark.parametrize(
    ("below", "want", "change"),
    [
        (11, [0.5, 1, 1.5, 2, 3, 4, 6], 0),
        (12, [0, 1, 2, 2, 3, 4, 6], 0.5),  # halves: 0.25 and 0.75 are ties, and go to the even 0 and 1
        (13, [0, 0, 2, 2, 4, 4, 6], 1),  # quarters: 0.375 -> 0.5, 0.75 -> 1
        (14, [0, 0, 0, 0, 4, 4, 8], 2),  # eighths: 0.25 is a tie, 0.75 -> 1
        (15, [0, 0, 0, 0, 0, 0, 8], 4),  # sixteenths: 0.25 is a tie, 0.375 -> 0.5
        (16, [0, 0, 0, 0, 0, 0, 0], 6),
        (100, [0, 0, 0, 0, 0, 0, 0], 6),
    ],
)
def test_groups_too_deep_are_rounded_and_told(below, want, change):
    every = list(range(1, 8))
    for sign in (0, 8):
        codes, scales = row_of(([7, 15], 200), ([code | sign for code in every], 200 - below), ([], 3))
        p, rounding = pack(codes, scales)
        scale = 2.0 ** (200 - below - 127)
        found = unpacked(p, 64, 128)
        assert found[0, :2].tolist() == [6 * 2.0**73, -6 * 2.0**73]
        assert found[0, 32:39].tolist() == [value * scale * (-1 if sign else 1) for value in want]
        assert rounding.total == 256
        assert rounding.groups == (1 if change else 0)
        assert rounding.worst == change / 6 * 2.0**-below


def test_a_deep_group_that_stays_exact_is_not_counted():
    p, rounding = pack(*row_of(([1], 140), ([4, 6, 5], 140 - 12)))  # 2, 4, 3 at half their size: 1, 2, 1.5
    assert rounding.groups == 0
    assert unpacked(p, 64, 128)[0, 32:35].tolist() == [2 * 2.0, 4 * 2.0, 3 * 2.0]


def test_rounding_equals_a_scalar_model_and_is_small():
    gen = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (64, 64), generator=gen, dtype=torch.uint8)
    codes[:, :16] &= 0x77 * (torch.arange(64)[:, None] % 3 > 0)  # a top group without codes does not count
    scales = torch.randint(90, 112, (64, 4), generator=gen, dtype=torch.uint8)
    p, rounding = pack(codes, scales)
    found, exact = unpacked(p, 64, 128), dequantize_mxfp4(codes, scales, torch.float64)
    groups, worst = 0, 0.0
    for row in range(64):
        live = [g for g in range(4) if exact[row, 32 * g : 32 * g + 32].any()]
        top = max(int(scales[row, g]) for g in live) - 127
        assert p.row_scale[0, row].item() == 2.0 ** (top - 6)
        for g in live:
            step = Fraction(2) ** max(int(scales[row, g]) - 127, top - 11)
            for k in range(32 * g, 32 * g + 32):
                value = Fraction(exact[row, k].item())
                nearest = min(range(8), key=lambda c: (abs(Fraction(E2M1[c]) - abs(value) / step), c % 2))
                assert abs(Fraction(found[row, k].item())) == Fraction(E2M1[nearest]) * step
        change = (found[row] - exact[row]).abs()
        groups += int(change.view(4, 32).any(1).sum())
        worst = max(worst, float(change.max() / exact[row].abs().max()))
    assert groups > 20
    assert rounding == fp8.Rounding(groups, 256, worst)
    assert worst <= 2.0**-12


def test_one_group_alone_has_the_largest_exponent_that_fits():
    for byte in (0, 1, 126, 127, 253, 254):
        codes, scales = row_of(([7, 9, 3], byte), ([], 255 - byte))
        scales[0, 1] = min(int(scales[0, 1]), 254)
        p, rounding = pack(codes, scales)
        assert rounding.groups == 0
        assert p.row_scale[0, 0].item() == 2.0 ** (byte - 127 - 6)  # down to 2^-133, an fp32 subnormal
        assert torch.equal(unpacked(p, 64, 128), dequantize_mxfp4(codes, scales, torch.float64))
        chunk = p.packed[0, 0, 0]
        assert chunk[4096:4100].tolist() == [88, 40, 40, 40]


def test_rows_without_weights_keep_neutral_scales():
    codes = torch.full((64, 64), 0x80, dtype=torch.uint8)  # zeros of either sign
    p, rounding = pack(codes, torch.randint(0, 255, (64, 4), dtype=torch.uint8))
    assert rounding == fp8.Rounding(0, 256, 0.0)
    assert bool((p.row_scale == 1).all())
    assert p.packed[..., 4096:].unique().tolist() == [40]
    assert unpacked(p, 64, 128).count_nonzero() == 0


def test_the_whole_span_of_e8m0_in_one_row_is_told():
    codes, scales = row_of(([1], 254), ([7], 0), ([7], 243), ([7], 242))
    p, rounding = pack(codes, scales)
    # 6 at 2^-12 of the top is exact as 3 at 2^-11; 6 at 2^-127 is gone.
    assert unpacked(p, 64, 128)[0, [0, 32, 64, 96]].tolist() == [2.0**126, 0, 6 * 2.0**116, 6 * 2.0**115]
    assert rounding == fp8.Rounding(1, 256, 6 * 2.0**-127 / 2.0**126)


def test_nan_scales_are_refused():
    codes, scales = row_of(([7], 127))
    scales[5, 2] = 255
    with pytest.raises(ValueError, match=r"^l: expert 0: weight .*row 5, group 2 is the e8m0 NaN"):
        pack(codes, scales)


def test_roundings_add_up():
    assert fp8.Rounding(1, 8, 0.5) + fp8.Rounding(2, 4, 0.25) == fp8.Rounding(3, 12, 0.5)


# The quantiser


def nearest_e4m3(value):
    """The e4m3 number nearest to a float, ties to even, saturated."""
    if math.isnan(value):
        return value
    magnitude = min(Fraction(abs(value)), Fraction(448))
    byte = min(range(0x7F), key=lambda b: (abs(Fraction(E4M3[b]) - magnitude), b % 2))
    return math.copysign(E4M3[byte], value)


def fp32(value):
    return torch.tensor(value, dtype=torch.float64).float().item()


def scalar_block(values):
    """(e4m3 values, scale) of a block of floats; every operation in float64 and rounded to fp32."""
    amax = max(abs(v) for v in values)
    if any(math.isnan(v) for v in values):
        amax = math.nan
    elif amax < 2.0**-100:
        amax = 2.0**-100
    inverse = fp32(448 / amax)
    return [nearest_e4m3(fp32(v * inverse)) for v in values], fp32(amax / 448)


def check_quantiser(x):
    values, scales = fp8.quantize_activations(x)
    assert (values.dtype, scales.dtype) == (torch.float32, torch.float32)
    assert values.shape == x.shape
    assert scales.shape == (x.shape[0], -(-x.shape[1] // 128))
    for row in range(x.shape[0]):
        for block in range(scales.shape[1]):
            k = slice(128 * block, 128 * block + 128)
            want, scale = scalar_block(x[row, k].double().tolist())
            torch.testing.assert_close(scales[row, block].item(), scale, rtol=0, atol=0, equal_nan=True)
            found = values[row, k].tolist()
            torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)
    return values, scales


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_random_activations(dtype):
    x = torch.randn(3, 200, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 3)[:, None]
    values, _ = check_quantiser(x.to(dtype))
    assert values.abs().amax(1).tolist() == [448] * 3


def test_ties_and_their_neighbours():
    numbers = torch.tensor(E4M3[:0x7F], dtype=torch.float64)
    middles = ((numbers[1:] + numbers[:-1]) / 2).float()
    near = torch.cat([middles, middles.nextafter(torch.tensor(0.0)), middles.nextafter(torch.tensor(999.0))])
    blocks = torch.nn.functional.pad(near, (0, -len(near) % 127)).view(-1, 127)
    check_quantiser(torch.nn.functional.pad(blocks, (1, 0), value=448.0))  # amax 448: the inverse is 1


def test_zero_tiny_and_huge_blocks():
    x = torch.zeros(6, 256)
    x[1, 3] = 2.0**-133  # bf16's smallest number
    x[2, :2] = torch.tensor([2.0**-100, -(2.0**-101)])
    x[3, 200] = -3.3e38
    x[4, 7], x[4, 8] = 3.3e38, 1.0
    x[5] = 2.0**-99
    values, scales = check_quantiser(x.bfloat16())
    assert values[:2].count_nonzero() == 0
    assert values[2, :2].tolist() == [448, -224]
    assert values[3, 200] == -448
    assert bool(scales.isfinite().all())
    assert bool((scales >= torch.finfo(torch.float32).tiny).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_blocks(bad):
    x = torch.ones(2, 300, dtype=torch.bfloat16)
    x[1, 130] = bad
    values, scales = fp8.quantize_activations(x)
    assert values[0].tolist() == [448] * 300
    assert bool(values[1, :128].eq(448).all())
    assert bool(values[1, 256:].eq(448).all())
    assert math.isnan(values[1, 130])
    assert not math.isfinite(scales[1, 1])
    if math.isnan(bad):
        assert bool(values[1, 128:256].isnan().all())
    else:
        assert scales[1, 1] == math.inf
        assert values[1, 131] == 0


def test_no_tokens_to_quantise():
    values, scales = fp8.quantize_activations(torch.zeros(0, 300, dtype=torch.float16))
    assert (values.shape, scales.shape) == ((0, 300), (0, 3))


def test_products_are_exact_where_their_sums_are():
    """Integers that e4m3 holds, a block's largest 448: scale 1, and sums below 2^24."""
    gen = torch.Generator().manual_seed(0)
    x = torch.randint(-15, 16, (9, 300), generator=gen).float()
    x[:, ::128] = 448.0
    codes, scales = within_the_window(64, 288, seed=1)
    scales[:] = 127
    p, _ = pack(torch.nn.functional.pad(codes, (0, 16)), torch.nn.functional.pad(scales, (0, 1), value=127))
    out = torch.empty(9, 64, dtype=torch.float16)
    plain_gemm(x[:, :288].half(), p, out)
    want = x[:, :288].double() @ dequantize_mxfp4(codes, scales, torch.float64).T
    assert torch.equal(out, want.half())


def test_a_blocks_sum_is_scaled_on_its_own():
    """Blocks whose scales differ by 2^40: the small one survives beside a large one of zero weights."""
    x = torch.ones(1, 256, dtype=torch.bfloat16)
    x[0, :128] = 2.0**40
    codes = torch.full((64, 128), 0x22, dtype=torch.uint8)
    codes[:, :64] = 0
    p, _ = pack(codes, torch.full((64, 8), 127, dtype=torch.uint8))
    out = torch.empty(1, 64, dtype=torch.bfloat16)
    plain_gemm(x, p, out)
    assert torch.equal(out, torch.full_like(out, 128.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_identity_activations_return_the_weights(dtype):
    codes, scales = within_the_window(96, 160, seed=4)
    p, _ = pack(codes, scales)
    out = torch.empty(160, 96, dtype=dtype)
    plain_gemm(torch.eye(160, dtype=dtype), p, out)
    assert torch.equal(out.T, dequantize_mxfp4(codes, scales, torch.float64).to(dtype))


# The layer


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_layer(name, bias, dtype):
    kw = ACTIVATIONS[name]
    layer = make_layer(5, 160, 96, gated=kw["activation"].gated, bias=bias, dtype=dtype, **FP8)
    x, weights, ids = make_inputs(17, 160, 5, 3, dtype=dtype)
    ids[4, 1] = -1
    out = run(layer, x, weights, ids, **kw)
    assert error(out, oracle_moe_fp8(x, weights, ids, None, *layer.dense, **kw)) < TOLERANCE[dtype]
    # and it is not the layer of 16-bit activations, which e4m3's 3 mantissa bits leave by some percent
    assert 0.005 < error(out, oracle_moe(x, weights, ids, None, *layer.dense, **kw)) < 0.08


@pytest.mark.parametrize(("hidden", "intermediate"), [(736, 96), (2880, 352), (1856, 736)])
def test_sizes_that_fill_no_tile(hidden, intermediate):
    layer = make_layer(2, hidden, intermediate, gate_up="interleaved", bias=True, **FP8)
    x, weights, ids = make_inputs(9, hidden, 2, 2)
    kw = ACTIVATIONS["swigluoai"]
    out = run(layer, x, weights, ids, **kw)
    assert error(out, oracle_moe_fp8(x, weights, ids, None, *layer.dense, **kw)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("bias", [False, True])
def test_router_weight_on_input_is_applied_after_the_quantiser(bias):
    layer = make_layer(4, 288, 96, bias=bias, **FP8)
    x, weights, ids = make_inputs(10, 288, 4, 3)
    out = run(layer, x, weights, ids, router_weight_on_input=True)
    want = oracle_moe_fp8(x, weights, ids, None, *layer.dense, router_weight_on_input=True, **SILU)
    assert error(out, want) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_token_that_is_not_finite_gives_nan_and_disturbs_nobody(name, bad):
    kw = ACTIVATIONS[name]
    layer = make_layer(4, 160, 96, gated=kw["activation"].gated, **FP8)
    x, weights, ids = make_inputs(8, 160, 4, 2)
    want = run(layer, x, weights, ids, **kw)
    x[3, 150] = bad
    out = run(layer, x, weights, ids, **kw)
    assert bool(out[3].isnan().all())
    rest = torch.arange(8) != 3
    torch.testing.assert_close(out[rest], want[rest], rtol=1e-2, atol=1e-2)


def test_ids_and_expert_map():
    layer = make_layer(3, 96, 96, **FP8)
    x, weights, ids = make_inputs(12, 96, 8, 4)
    expert_map = torch.tensor([-1, 2, -1, 0, -1, 1, -1, -1], dtype=torch.int32)
    ids[2] = -1
    out = run(layer, x, weights, ids, expert_map)
    assert error(out, oracle_moe_fp8(x, weights, ids, expert_map, *layer.dense, **SILU)) < TOLERANCE[torch.bfloat16]
    assert out[2].count_nonzero() == 0
    assert run(layer, x[:0], weights[:0], ids[:0]).shape == (0, 96)


def test_rows_that_span_more_than_e4m3_err_by_no_more_than_their_activations():
    """A quarter of the groups 2^0 to 2^24 below their row's largest: the layer is still that of the exact weights."""
    layer = make_layer(3, 256, 128, span=24, **FP8)
    x, weights, ids = make_inputs(20, 256, 3, 2)
    out = run(layer, x, weights, ids)
    assert error(out, oracle_moe_fp8(x, weights, ids, None, *layer.dense, **SILU)) < TOLERANCE[torch.bfloat16]


def test_large_and_small_weights_pass_through_the_row_scale():
    for exponent in (-40, 40):
        layer = make_layer(3, 160, 96, gated=False, gain=2.0**exponent, **FP8)
        x, weights, ids = make_inputs(6, 160, 3, 2)
        x *= 2.0**-exponent
        out = run(layer, x, weights, ids, **ACTIVATIONS["relu2"])
        want = oracle_moe_fp8(x, weights, ids, None, *layer.dense, **ACTIVATIONS["relu2"])
        assert error(out, want) < TOLERANCE[torch.bfloat16]


SCALE_PROGRAM = r"""
#include <cstdint>
#include <cstdio>
#include <cstring>
#include "moe/fp8_scale.h"
using vllm_humming::Fp8Scale;
static float f(uint32_t u) { float x; std::memcpy(&x, &u, 4); return x; }
static uint32_t bits(float x) { uint32_t u; std::memcpy(&u, &x, 4); return u; }
int main() {
  long wrong = 0, seen = 0;
  // Every 251st magnitude from 2^-126 to the largest, and reciprocals that are one unit off either way.
  for (uint32_t u = 0x00800000; u <= 0x7f7fffff; u += 251) {
    const float amax = f(u), least = amax < 0x1p-100f ? 0x1p-100f : amax, d = Fp8Scale::divisor(amax);
    const uint32_t reciprocal = bits(float(1.0 / double(d)));
    for (int off = -1; off <= 1; ++off, ++seen) {
      const Fp8Scale s(amax, f(reciprocal + off));
      wrong += s.scale != least / 448.0f || s.factor != 448.0f / least;
    }
  }
  const Fp8Scale zero(0.0f, 1.0f / Fp8Scale::divisor(0.0f)), infinite(INFINITY, 0.0f), nan(NAN, NAN);
  wrong += zero.scale != 0x1p-100f / 448.0f || infinite.scale != INFINITY || infinite.factor != 0.0f;
  wrong += nan.scale == nan.scale || nan.factor == nan.factor;
  std::printf("%ld %ld\n", seen, wrong);
}
"""


def test_the_kernels_scales_are_correctly_rounded_quotients(tmp_path):
    """They are worked out without a division (csrc/moe/fp8_scale.h), from an approximate reciprocal."""
    source, program = tmp_path / "scale.cpp", tmp_path / "scale"
    source.write_text(SCALE_PROGRAM)
    csrc = Path(__file__).parent.parent / "csrc"
    subprocess.run(["g++", "-std=c++20", "-O2", f"-I{csrc}", "-o", program, source], check=True)
    seen, wrong = map(int, subprocess.run([program], check=True, capture_output=True, text=True).stdout.split())
    assert seen > 20_000_000
    assert wrong == 0
