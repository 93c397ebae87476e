# SPDX-License-Identifier: Apache-2.0
"""NVFP4: the packed layout against a scalar reading of docs/kernel-notes.md, quantisation, and their refusals.

The scalar reading decodes e2m1, e4m3 and the kernel's factors from their bits, and shares no table with the package.
"""

import math
from fractions import Fraction

import packed_layout
import pytest
import torch
from packed_layout import DTYPES, ORDERS, bits_to_float, packed_row
from plain_gemm import plain_gemm

import vllm_humming.ops  # noqa: F401  (defines the ops)
from vllm_humming.moe import quantize
from vllm_humming.moe.packing import allocate, pack_expert, unpack_expert
from vllm_humming.moe.quantize import dequantize_nvfp4, nvfp4_global_scale, quantize_nvfp4
from vllm_humming.moe.weight_formats import NVFP4

# Every scale that a weight may have: 0 to 448, and -0.0.
SCALES = [*range(0x7F), 0x80]


def e2m1(code):
    exponent, mantissa = code >> 1 & 3, code & 1
    magnitude = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -magnitude if code & 8 else magnitude


def e4m3(byte):
    exponent, mantissa = byte >> 3 & 15, byte & 7
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -magnitude if byte & 0x80 else magnitude


def decode_chunk(chunk, dtype):
    assert len(chunk) == 4608

    def factor_of(row, k):
        p = chunk[4096 + row * 8 + k // 16]
        assert 11 <= p >> 3 <= 28
        return bits_to_float(p << 4 | 0x7000 if dtype == torch.bfloat16 else p << 7, dtype)

    return packed_layout.decode_chunk(chunk, dtype, factor_of)


def every_code_and_scale():
    """[64, 128]: each group of 16 holds every code once; the 512 groups hold every scale four times."""
    codes = torch.arange(16).roll(3)
    codes = (codes[0::2] | codes[1::2] << 4).to(torch.uint8).repeat(64, 8)
    return codes, torch.tensor(SCALES * 4, dtype=torch.uint8).view(64, 8)


def pack(codes, scales, global_scale=None, *, n=64, k=128, gated=False, gate_up="packed", dtype=torch.bfloat16):
    p = allocate(
        1, n, k, gated=gated, has_bias=False, device="cpu", pad_rows_to=32 if gated else 64, weight_format=NVFP4
    )
    global_scale = torch.tensor(1.0) if global_scale is None else global_scale
    pack_expert(
        p, 0, codes, scales, None, global_scale=global_scale, gated=gated, gate_up=gate_up, dtype=dtype, layer="l"
    )
    return p


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("gated", "gate_up"), ORDERS)
def test_threads_decode_every_code_and_scale(dtype, gated, gate_up):
    codes, scales = every_code_and_scale()
    rows = torch.linspace(0.001, 3.0, 64)  # a global scale a row: gate and up are no special case
    p = pack(codes, scales, rows, gated=gated, gate_up=gate_up, dtype=dtype)
    weights = decode_chunk(p.packed[0, 0, 0].tolist(), dtype)
    seen = set()
    for row in range(64):
        _, place = packed_row(row, 64, gated, gate_up)
        for k in range(128):
            byte = int(codes[row, k // 2])
            code, scale = byte >> 4 if k % 2 else byte & 15, int(scales[row, k // 16])
            # exact in float64: 2 + 4 + 24 significant bits
            want = e2m1(code) * e4m3(scale) * float(rows[row])
            assert weights[place, k] * float(p.row_scale[0, place]) == want
            seen.add((code, scale))
    assert len(seen) == 16 * 128
    found, _ = unpack_expert(p, 0, dtype=dtype, k=128, out_features=64, gated=gated, out_dtype=torch.float64)
    exact = dequantize_nvfp4(codes, scales, rows, torch.float64)
    assert torch.equal(found, torch.cat([exact[::2], exact[1::2]]) if gate_up == "interleaved" else exact)


@pytest.mark.parametrize("dtype", DTYPES)
def test_identity_activations_return_the_weights(dtype):
    """The reference behind the op: bit for bit e2m1 * e4m3 for every code and scale, the global scale in fp32."""
    codes, scales = every_code_and_scale()
    out = torch.empty(128, 64, dtype=dtype)
    for global_scale in (0.5, 0.37):
        p = pack(codes, scales, torch.tensor(global_scale), dtype=dtype)
        plain_gemm(torch.eye(128, dtype=dtype), p, out)
        values = [[e2m1(c) * e4m3(s) for c in range(16)] for s in range(256)]
        table = torch.tensor(values, dtype=torch.float64)
        nibbles = torch.stack([codes & 15, codes >> 4], -1).view(64, 128).long()
        exact = table[scales.long().repeat_interleave(16, 1), nibbles].float()
        assert torch.equal(out.T, (exact * torch.tensor(global_scale)).to(dtype))


def test_float16_does_not_overflow_where_bfloat16_does_not():
    """Sums of 448 * 6 * 128 leave float16's range before the global scale, not after."""
    codes, scales = torch.full((64, 64), 0x77, dtype=torch.uint8), torch.full((64, 8), 0x7E, dtype=torch.uint8)
    p = pack(codes, scales, torch.tensor(2.0**-10), dtype=torch.float16)
    out = torch.empty(1, 64, dtype=torch.float16)
    x = torch.ones(1, 128, dtype=torch.float16)
    plain_gemm(x, p, out)
    assert torch.equal(out, torch.full_like(out, 448 * 6 * 128 / 1024))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("gated", "gate_up"), ORDERS)
@pytest.mark.parametrize(("n", "k"), [(64, 128), (208, 80), (1856, 240), (736, 2688)])
def test_round_trip_of_odd_sizes_and_padding_is_zero(dtype, gated, gate_up, n, k):
    gen = torch.Generator().manual_seed(k)
    codes = torch.randint(0, 256, (n, k // 2), generator=gen, dtype=torch.uint8)
    scales = torch.randint(0, 0x7F, (n, k // 16), generator=gen, dtype=torch.uint8)
    rows = torch.rand(n, generator=gen) + 0.1
    p = allocate(1, n, k, gated=gated, has_bias=False, device="cpu", weight_format=NVFP4)
    pack_expert(p, 0, codes, scales, None, global_scale=rows, gated=gated, gate_up=gate_up, dtype=dtype, layer="l")
    exact = dequantize_nvfp4(codes, scales, rows, torch.float64)
    if gate_up == "interleaved":
        exact = torch.cat([exact[::2], exact[1::2]])
    make = {"dtype": dtype, "gated": gated, "out_dtype": torch.float64}
    assert torch.equal(unpack_expert(p, 0, k=k, out_features=n, **make)[0], exact)
    whole, _ = unpack_expert(p, 0, k=p.packed.shape[2] * 128, out_features=p.row_scale.shape[1], **make)
    assert whole.count_nonzero() == exact.count_nonzero()


def test_scale_dtypes_pack_alike():
    codes, scales = every_code_and_scale()
    values = scales.view(torch.float8_e4m3fn)
    packed = [pack(codes, form).packed for form in (scales, values, values.float())]
    assert all(torch.equal(packed[0], other) for other in packed[1:])


def refused(match, codes, scales, global_scale):
    p = allocate(3, 64, 128, gated=False, has_bias=False, device="cpu", weight_format=NVFP4)
    before = [None if t is None else t.clone() for t in p.tensors]
    kwargs = {"gated": False, "dtype": torch.float16, "layer": "model.layers.3.experts", "tensor": "w2"}
    with pytest.raises(ValueError, match=rf"^model\.layers\.3\.experts: expert 2: w2 .*{match}"):
        pack_expert(p, 2, codes, scales, None, global_scale=global_scale, **kwargs)
    for t, old in zip(p.tensors, before, strict=True):
        assert t is None or torch.equal(t, old)


@pytest.mark.parametrize("byte", [0x7F, 0xFF, 0x81, 0xFE])
@pytest.mark.parametrize("form", [torch.uint8, torch.float8_e4m3fn])
def test_nan_and_negative_scales_are_refused(byte, form):
    codes, scales = every_code_and_scale()
    codes[5] = 0  # even where it scales nothing
    scales[5, 2] = byte
    refused(f"row 5, group 2 is .*byte {byte:#04x}.*expected", codes, scales.view(form), torch.tensor(1.0))


@pytest.mark.parametrize("bad", [0.0, -0.0, -1.0, math.nan, math.inf, -math.inf])
def test_global_scales_that_are_not_positive_and_finite_are_refused(bad):
    rows = torch.ones(64)
    rows[9] = bad
    refused("global scale must be positive and finite, found", *every_code_and_scale(), rows)


@pytest.mark.parametrize("bad", [2.0**119, 2.0**-136, 1e-45])
def test_global_scales_outside_the_normal_range_are_refused(bad):
    refused(r"global scale must be in 2\^-135\.\.2\^119", *every_code_and_scale(), torch.tensor(bad))


@pytest.mark.parametrize("good", [2.0**-135, 2.0**118, 3.4e35])
def test_global_scales_at_the_ends_of_the_range_pack(good):
    codes, scales = every_code_and_scale()
    p = pack(codes, scales, torch.tensor(good))
    weight, _ = unpack_expert(p, 0, dtype=torch.bfloat16, k=128, out_features=64, gated=False, out_dtype=torch.float64)
    assert torch.equal(weight, dequantize_nvfp4(codes, scales, torch.tensor(good), torch.float64))


def test_wrong_shapes_and_dtypes_are_refused():
    codes, scales = every_code_and_scale()
    one = torch.tensor(1.0)
    refused(r"scales must be \(64, 8\), found \(64, 4\)", codes, scales[:, :4], one)
    refused("scales must be uint8, float8_e4m3fn or float32, found torch.float8_e8m0fnu", codes,
            scales.view(torch.float8_e8m0fnu), one)  # fmt: skip
    refused("scales must be exact e4m3 values", codes, scales.float() + 0.1, one)
    refused("K a multiple of 16", codes[:, :60], scales, one)
    refused("global scale is missing", codes, scales, None)
    refused(r"global scale must be one float32 or \(64,\), found torch.float32 \(2,\)", codes, scales, torch.ones(2))
    refused("global scale must be one float32 .*found torch.float64", codes, scales, one.double())
    p = allocate(1, 64, 128, gated=False, has_bias=False, device="cpu")
    with pytest.raises(ValueError, match="global scale is nothing that MXFP4 has"):
        pack_expert(p, 0, codes, scales[:, :4], None, global_scale=one, gated=False, dtype=torch.float16, layer="l")


# Quantisation

E4M3 = sorted((Fraction(e4m3(byte)), byte) for byte in range(0x7F))
E2M1 = [Fraction(e2m1(code)) for code in range(8)]


def nearest(value, grid):
    """Index of the nearest of ascending values; a tie goes to the even index."""
    return min(range(len(grid)), key=lambda i: (abs(grid[i] - value), i % 2))


def check(w, global_scale=None):
    codes, scales, factor = quantize_nvfp4(w, global_scale)
    assert (codes.dtype, scales.dtype, factor.dtype, factor.dim()) == (torch.uint8, torch.uint8, torch.float32, 0)
    for row in range(w.shape[0]):
        for group in range(w.shape[1] // 16):
            values = w[row, 16 * group : 16 * group + 16].float()
            wanted = Fraction(float(values.abs().max() / 6.0 / factor))  # fp32, as documented
            byte = E4M3[nearest(min(wanted, Fraction(448)), [value for value, _ in E4M3])][1]
            assert int(scales[row, group]) == byte
            step = Fraction(float(torch.tensor(e4m3(byte)) * factor))
            packed = codes[row, 8 * group : 8 * group + 8].tolist()
            for value, code in zip(values.tolist(), [c for b in packed for c in (b & 15, b >> 4)], strict=True):
                magnitude = nearest(min(abs(Fraction(value)) / step, Fraction(6)), E2M1) if step else 0
                assert code == magnitude | (8 if math.copysign(1, value) < 0 else 0)
    return codes, scales, factor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_random_weights(dtype):
    w = torch.randn(8, 96, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 3, 8)[:, None]
    w = w.to(dtype)
    assert check(w)[2] == w.abs().max().float() / 2688


def test_every_midpoint_and_its_neighbours():
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    near = torch.cat([middles, middles.nextafter(torch.tensor(0.0)), middles.nextafter(torch.tensor(9.0))])
    row = torch.zeros(32)
    row[:15], row[15] = near[:15], 6.0
    row[16:22], row[22:31], row[31] = near[15:], -near[:9], -6.0
    codes, scales, _ = check(row[None], torch.tensor(1.0))
    assert scales.unique().tolist() == [0x38]
    assert codes.unique().numel() > 8


def test_extreme_and_zero_groups():
    w = torch.zeros(5, 32)
    w[1, 3] = 1e-30  # a scale far below e4m3's smallest: the group becomes zero
    w[2, :2] = torch.tensor([2688.0, -1.0])
    w[3] = torch.linspace(-1, 1, 32) * 2.0**-9 * 6 * 1.6  # subnormal scales
    codes, scales, factor = check(w)
    assert factor == 1.0
    assert scales[1, 0] == 0
    assert not (codes[1] & 0x77).any()
    assert quantize_nvfp4(torch.zeros(2, 16))[2] == 1.0
    tiny = torch.full((1, 16), 1e-44)
    assert quantize_nvfp4(tiny)[2] == torch.finfo(torch.float32).tiny
    assert not dequantize_nvfp4(*quantize_nvfp4(tiny), torch.float64).any()


@pytest.mark.parametrize("largest", [3e38, 1.0, 1e-30])
def test_what_is_quantised_can_be_packed(largest):
    w = torch.randn(64, 128, generator=torch.Generator().manual_seed(5))
    w *= largest / w.abs().max()
    codes, scales, factor = quantize_nvfp4(w)
    weight, _ = unpack_expert(
        pack(codes, scales, factor), 0, dtype=torch.bfloat16, k=128, out_features=64, gated=False,
        out_dtype=torch.float64,
    )  # fmt: skip
    assert torch.equal(weight, dequantize_nvfp4(codes, scales, factor, torch.float64))


def test_error_bounds():
    """A weight is at most one step off where its group's scale is a normal e4m3 number (steps of 2 above 4; a scale
    that rounds down by 1/16 saturates the largest by less); the whole by about a tenth, less than MXFP4's."""
    w = torch.randn(256, 512, generator=torch.Generator().manual_seed(6)).double()
    w *= torch.exp2(torch.rand(256, 1, generator=torch.Generator().manual_seed(7)) * 4)
    codes, scales, factor = quantize_nvfp4(w)
    error = (dequantize_nvfp4(codes, scales, factor, torch.float64) - w).abs()
    step = (scales.view(torch.float8_e4m3fn).double() * factor.double()).repeat_interleave(16, 1)
    assert scales.min() >= 8
    assert bool((error <= step * (1 + 1e-6)).all())
    relative = float(error.norm() / w.norm())
    assert 0.05 < relative < 0.1
    mxfp4 = quantize.dequantize_mxfp4(*quantize.quantize_mxfp4(w), torch.float64)
    assert relative < float((mxfp4 - w).norm() / w.norm())


def test_values_on_the_grid_survive():
    gen = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (16, 64), generator=gen, dtype=torch.uint8)
    codes[:, ::8] = 0x75  # every group holds its 6, so that its scale is found again
    codes = torch.where(codes & 0x0F == 8, codes & 0xF0, codes)
    scales = torch.randint(8, 0x7F, (16, 8), generator=gen, dtype=torch.uint8)
    scales[0, 0] = 0x7E  # and the largest scale: so is the global one
    dense = dequantize_nvfp4(codes, scales, torch.tensor(0.25), torch.float32)
    again, scales_again, factor = quantize_nvfp4(dense)
    assert factor == 0.25
    assert torch.equal(scales_again, scales)
    assert torch.equal(dequantize_nvfp4(again, scales_again, factor, torch.float32), dense)


def test_chunks_give_the_same_result(monkeypatch):
    w = torch.randn(70, 64, generator=torch.Generator().manual_seed(2))
    whole = quantize_nvfp4(w)
    monkeypatch.setattr(quantize, "_CHUNK_ELEMENTS", 640)
    assert all(torch.equal(a, b) for a, b in zip(whole, quantize_nvfp4(w), strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_weights_are_refused(bad):
    w = torch.ones(3, 64, dtype=torch.bfloat16)
    w[2, 40] = bad
    with pytest.raises(ValueError, match="NaN or infinity in row 2"):
        nvfp4_global_scale(w)
    with pytest.raises(ValueError, match="NaN or infinity in row 2"):
        quantize_nvfp4(w, torch.tensor(1.0))


def test_wrong_inputs_are_refused():
    with pytest.raises(ValueError, match="NVFP4 quantisation needs K to be a multiple of 16, found K = 40"):
        quantize_nvfp4(torch.ones(2, 40))
    with pytest.raises(ValueError, match="floating-point"):
        quantize_nvfp4(torch.ones(2, 32, dtype=torch.int32))
    with pytest.raises(ValueError, match="do not belong"):
        dequantize_nvfp4(*(torch.zeros(2, n, dtype=torch.uint8) for n in (16, 1)), torch.tensor(1.0), torch.float32)
