# SPDX-License-Identifier: Apache-2.0
"""MXFP4 rounding against a scalar model in exact rational arithmetic."""

import math
from fractions import Fraction

import pytest
import torch

from vllm_humming.moe import quantize
from vllm_humming.moe.quantize import dequantize_mxfp4, quantize_mxfp4

MAGNITUDES = [Fraction(v) for v in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]


def scalar_group(values):
    """(scale byte, codes) of 32 floats."""
    amax = max(abs(Fraction(v)) for v in values)
    exponent = 0
    if amax:
        exponent = math.frexp(float(amax))[1] - 1 - 2
        exponent = max(-127, min(127, exponent))
    codes = []
    for v in values:
        scaled = abs(Fraction(v)) / Fraction(2) ** exponent
        # nearest; a tie goes to the even code
        code = min(range(8), key=lambda c: (abs(MAGNITUDES[c] - scaled), c % 2))
        codes.append(code | (8 if math.copysign(1, v) < 0 else 0))
    return exponent + 127, codes


def check(w):
    codes, scales = quantize_mxfp4(w)
    assert (codes.dtype, scales.dtype) == (torch.uint8, torch.uint8)
    for row in range(w.shape[0]):
        for group in range(w.shape[1] // 32):
            byte, want = scalar_group(w[row, 32 * group : 32 * group + 32].float().tolist())
            assert int(scales[row, group]) == byte
            packed = codes[row, 16 * group : 16 * group + 16].tolist()
            assert [code for b in packed for code in (b & 15, b >> 4)] == want


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_random_weights(dtype):
    w = torch.randn(8, 96, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, 8)[:, None]
    check(w.to(dtype))


def test_every_midpoint_and_its_neighbours():
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    near = torch.cat([middles, middles.nextafter(torch.tensor(0.0)), middles.nextafter(torch.tensor(9.0))])
    row = torch.zeros(32)
    row[:21], row[21], row[22], row[23], row[24] = near, 7.9375, 6.5, -0.0, -7.0
    w = torch.stack([row, -row, row * 2.0**-100, row * 2.0**90])
    w[:2, 0] *= 1.0
    check(w)


def test_extreme_and_zero_groups():
    tiny = torch.tensor(1, dtype=torch.int32).view(torch.float32).item()
    w = torch.zeros(5, 32)
    w[1, 3] = tiny
    w[2, :2] = torch.tensor([torch.finfo(torch.float32).max, -1.0])
    w[3] = 2.0**-126 * torch.linspace(-1, 1, 32)
    w[4] = 2.0**-128
    check(w)
    assert quantize_mxfp4(w)[1][0].item() == 127


def test_values_on_the_grid_survive():
    gen = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (16, 64), generator=gen, dtype=torch.uint8)
    codes[:, ::16] = 0x75  # every group holds its 6, so that its scale is found again
    scales = torch.randint(1, 250, (16, 4), generator=gen, dtype=torch.uint8)
    again, scales_again = quantize_mxfp4(dequantize_mxfp4(codes, scales, torch.float32))
    assert torch.equal(scales_again, scales)
    assert torch.equal(again, codes)


def test_chunks_give_the_same_result(monkeypatch):
    w = torch.randn(70, 64, generator=torch.Generator().manual_seed(2))
    whole = quantize_mxfp4(w)
    dense = dequantize_mxfp4(*whole, torch.float32)
    monkeypatch.setattr(quantize, "_CHUNK_ELEMENTS", 640)
    assert all(torch.equal(a, b) for a, b in zip(whole, quantize_mxfp4(w), strict=True))
    assert torch.equal(dense, dequantize_mxfp4(*whole, torch.float32))


def test_the_default_dtype_does_not_matter():
    """An engine loads weights under a bfloat16 default dtype."""
    w = torch.randn(16, 256, generator=torch.Generator().manual_seed(4)) * 3
    w[:, :7] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]).nextafter(torch.tensor(0.0))
    want = quantize_mxfp4(w)
    dense = dequantize_mxfp4(*want, torch.float32)
    tables = (quantize._rounding_bounds, quantize._value_pairs, quantize._scale_table)
    try:
        torch.set_default_dtype(torch.bfloat16)
        for table in tables:
            table.cache_clear()
        got = quantize_mxfp4(w)
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
        assert torch.equal(dense, dequantize_mxfp4(*got, torch.float32))
    finally:
        torch.set_default_dtype(torch.float32)
        for table in tables:
            table.cache_clear()


def test_the_input_is_not_written_and_may_be_strided():
    w = torch.randn(64, 32, generator=torch.Generator().manual_seed(3)).T
    before = w.clone()
    codes, scales = quantize_mxfp4(w)
    assert torch.equal(w, before)
    assert torch.equal(codes, quantize_mxfp4(w.contiguous())[0])
    assert tuple(scales.shape) == (32, 2)


def test_dequantize_of_nan_and_empty():
    codes = torch.full((1, 16), 0x22, dtype=torch.uint8)
    assert dequantize_mxfp4(codes, torch.tensor([[255]], dtype=torch.uint8), torch.float32).isnan().all()
    largest = dequantize_mxfp4(codes, torch.tensor([[254]], dtype=torch.uint8), torch.float64)
    assert bool((largest == 2.0**127).all())
    assert dequantize_mxfp4(codes[:0], torch.empty(0, 1, dtype=torch.uint8), torch.bfloat16).shape == (0, 32)
    assert quantize_mxfp4(torch.empty(0, 64))[0].shape == (0, 32)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_weights_are_refused(bad):
    w = torch.ones(3, 64, dtype=torch.bfloat16)
    w[2, 40] = bad
    with pytest.raises(ValueError, match="NaN or infinity in row 2"):
        quantize_mxfp4(w)


def test_wrong_inputs_are_refused():
    with pytest.raises(ValueError, match="multiple of 32, found K = 48"):
        quantize_mxfp4(torch.ones(2, 48))
    with pytest.raises(ValueError, match="floating-point"):
        quantize_mxfp4(torch.ones(2, 32, dtype=torch.int32))
    with pytest.raises(ValueError, match="floating-point"):
        quantize_mxfp4(torch.ones(2, 2, 32))
    with pytest.raises(ValueError, match="do not belong"):
        dequantize_mxfp4(torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8), torch.float32)
