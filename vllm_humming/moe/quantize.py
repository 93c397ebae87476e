# SPDX-License-Identifier: Apache-2.0
"""FP4 quantisation of dense weights, and back.

MXFP4: OCP Microscaling Formats (MX) v1.0, e2m1 elements, e8m0 scales, groups of 32. NVFP4: e2m1 elements, e4m3 scales,
groups of 16, an fp32 global scale.
"""

import math
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_humming.moe.codes import E2M1_VALUES
from vllm_humming.moe.weight_formats import MXFP4, NVFP4, WeightFormat

_CHUNK_ELEMENTS = 1 << 22  # temporaries are a few times this many float32
_E2M1_MAX = 6.0
_E4M3_MAX = 448.0


class Quantized(NamedTuple):
    """codes uint8 [N, K/2], even k in the low nibble; scales: raw bytes uint8 [N, K/group]; global_scale: fp32 [], or
    None where the format has none.
    """

    codes: Tensor
    scales: Tensor
    global_scale: Tensor | None


def quantize(w: Tensor, weight_format: WeightFormat, global_scale: Tensor | None = None) -> Quantized:
    """Quantises w [N, K] to weight_format; see quantize_mxfp4 and quantize_nvfp4 for the rules and errors."""
    if weight_format is NVFP4:
        return Quantized(*quantize_nvfp4(w, global_scale))
    return Quantized(*quantize_mxfp4(w), None)


def dequantize(quantized: Quantized, weight_format: WeightFormat, dtype: torch.dtype) -> Tensor:
    """Weights [N, K] in dtype; see dequantize_mxfp4 and dequantize_nvfp4."""
    codes, scales, global_scale = quantized
    if weight_format is NVFP4:
        assert global_scale is not None
        return dequantize_nvfp4(codes, scales, global_scale, dtype)
    return dequantize_mxfp4(codes, scales, dtype)


def quantize_mxfp4(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises w [N, K] (any float dtype) to MXFP4: (codes uint8 [N, K/2], e8m0 scales uint8 [N, K/32]).

    Per group of 32 along K the scale is 2^(floor(log2(amax)) - 2), clamped to 2^-127..2^127; elements are rounded to
    nearest even and saturate at 6 (OCP MX v1.0, section 6.3). Even k in the low nibble. A zero group gets scale 1.
    Raises ValueError when w is not 2-D floating point, K is no multiple of 32, or w holds NaN or infinity.
    """
    codes, scales = _allocate(w, MXFP4)
    for first, rows in _chunks(w):
        groups, amax = _groups(w[rows], MXFP4, first)
        _, exponent = torch.frexp(amax)  # amax = m * 2^exponent, 0.5 <= m < 1
        scale = torch.where(amax > 0, (exponent - 3).clamp(-127, 127), 0) + 127
        # 2^-s as a table look-up: exact, where exp2 need not be
        inverse = _scale_table(w.device, torch.float32).index_select(0, 254 - scale.view(-1))
        _round_codes(groups.mul_(inverse.view_as(scale)[..., None]), codes[rows])
        scales[rows].copy_(scale)
    return codes, scales


def quantize_nvfp4(w: Tensor, global_scale: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Quantises w [N, K] (any float dtype) to NVFP4: (codes uint8 [N, K/2], e4m3 scales uint8 [N, K/16], global scale).

    global_scale: fp32 [], by default nvfp4_global_scale(w). Per group of 16 along K the scale is
    e4m3(amax / 6 / global_scale), rounded to nearest even; elements are w / (scale * global_scale), rounded to nearest
    even, and saturate at 6. A group whose scale rounds to zero becomes zero. Even k in the low nibble.
    Raises ValueError when w is not 2-D floating point, K is no multiple of 16, or w holds NaN or infinity.
    """
    codes, scales = _allocate(w, NVFP4)
    if global_scale is None:
        global_scale = nvfp4_global_scale(w)
    for first, rows in _chunks(w):
        groups, amax = _groups(w[rows], NVFP4, first)
        scale = (amax / _E2M1_MAX / global_scale).clamp(max=_E4M3_MAX).to(torch.float8_e4m3fn)
        step = scale.float() * global_scale
        # Not a product with 1 / step: that would round twice.
        groups.div_(torch.where(step > 0, step, math.inf)[..., None])
        _round_codes(groups, codes[rows])
        scales[rows].copy_(scale.view(torch.uint8))
    return codes, scales, global_scale


def nvfp4_global_scale(w: Tensor) -> Tensor:
    """amax(|w|) / (448 * 6) as fp32 [], so that the largest group's scale is e4m3's largest; 1 for zero weights.

    At least 2^-126, below which all weights become zero. Raises ValueError when w holds NaN or infinity.
    """
    largest = w.abs().amax().float() if w.numel() else torch.zeros((), device=w.device)
    if not bool(largest.isfinite()):
        row = int((~w.isfinite().all(-1)).nonzero()[0, 0])
        raise ValueError(f"NVFP4 quantisation needs finite weights, found NaN or infinity in row {row}")
    # by a tensor: GPUs divide by a number through its reciprocal, and every device must find the same scale
    scale = (largest / torch.full_like(largest, _E4M3_MAX * _E2M1_MAX)).clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where(largest > 0, scale, 1.0)


def dequantize_mxfp4(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """MXFP4 [N, K/2] codes and [N, K/32] e8m0 scales (uint8) -> weights [N, K] in dtype.

    Exact in float64 and, below 2^128, in float32; other dtypes round once. An e8m0 NaN (255) gives NaN.
    Raises ValueError when the two shapes do not belong together.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return _dequantize(codes, scales, _scale_table(codes.device, wide), MXFP4, dtype, wide, None)


def dequantize_nvfp4(codes: Tensor, scales: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """NVFP4 [N, K/2] codes, [N, K/16] e4m3 scales (uint8) and a global scale (fp32, one or [N]) -> weights in dtype.

    Exact in float64; other dtypes round the product with the global scale to float32, and dtype once. An e4m3 NaN
    gives NaN. Raises ValueError when the shapes do not belong together.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    values = torch.arange(256, dtype=torch.uint8, device=codes.device).view(torch.float8_e4m3fn).to(wide)
    factor = global_scale.to(wide).reshape(-1, 1)
    return _dequantize(codes, scales, values, NVFP4, dtype, wide, factor.expand(codes.shape[0], 1))


def _allocate(w: Tensor, fmt: WeightFormat) -> tuple[Tensor, Tensor]:
    """Uninitialised codes and scales for w, which is checked."""
    if w.dim() != 2 or not w.dtype.is_floating_point:
        raise ValueError(
            f"{fmt.label} quantisation needs a floating-point [N, K] tensor, found {w.dtype} {tuple(w.shape)}"
        )
    n, k = w.shape
    if k % fmt.group_k:
        raise ValueError(f"{fmt.label} quantisation needs K to be a multiple of {fmt.group_k}, found K = {k}")
    codes = torch.empty((n, k // 2), dtype=torch.uint8, device=w.device)
    return codes, torch.empty((n, k // fmt.group_k), dtype=torch.uint8, device=w.device)


def _chunks(w: Tensor) -> list[tuple[int, slice]]:
    """(first row, rows) of the parts that a conversion handles at a time."""
    step = max(1, _CHUNK_ELEMENTS // max(w.shape[1], 1))
    return [(start, slice(start, start + step)) for start in range(0, w.shape[0], step)]


def _groups(w: Tensor, fmt: WeightFormat, first_row: int) -> tuple[Tensor, Tensor]:
    """A float32 copy of w as [N, groups, group], and the groups' largest magnitudes."""
    groups = w.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    groups = groups.view(w.shape[0], -1, fmt.group_k)
    amax = groups.abs().amax(-1)
    if not bool(amax.isfinite().all()):
        row = first_row + int((~amax.isfinite()).nonzero()[0, 0])
        raise ValueError(f"{fmt.label} quantisation needs finite weights, found NaN or infinity in row {row}")
    return groups, amax


def _round_codes(scaled: Tensor, codes: Tensor) -> None:
    """Scaled weights float32 [N, groups, group] -> codes [N, K/2], nearest even, saturated at 6."""
    code = torch.bucketize(scaled.abs(), _rounding_bounds(scaled.device), out_int32=True).to(torch.uint8)
    code |= torch.signbit(scaled).to(torch.uint8) << 3
    code = code.view(scaled.shape[0], -1, 2)
    torch.bitwise_or(code[..., 0], code[..., 1] << 4, out=codes)


def _dequantize(
    codes: Tensor,
    scales: Tensor,
    scale_values: Tensor,
    fmt: WeightFormat,
    dtype: torch.dtype,
    wide: torch.dtype,
    row_factor: Tensor | None,
) -> Tensor:
    n, half_k = codes.shape
    if tuple(scales.shape) != (n, half_k * 2 // fmt.group_k) or half_k * 2 % fmt.group_k:
        raise ValueError(f"scales {tuple(scales.shape)} do not belong to codes {tuple(codes.shape)}")
    out = torch.empty((n, half_k * 2), dtype=dtype, device=codes.device)
    values = _value_pairs(codes.device, wide)
    for _, rows in _chunks(out):
        part = values.index_select(0, codes[rows].reshape(-1).view(torch.uint8).to(torch.int32)).view(-1, fmt.group_k)
        part.mul_(scale_values.index_select(0, scales[rows].reshape(-1).view(torch.uint8).to(torch.int32))[:, None])
        part = part.view(-1, half_k * 2)
        out[rows] = part if row_factor is None else part.mul_(row_factor[rows])
    return out


@lru_cache(maxsize=32)
def _rounding_bounds(device: torch.device) -> Tensor:
    """Ascending bounds: a magnitude's code is the number of bounds strictly below it.

    A tie goes to the even code, so the bound under an even code is one step below the midpoint.
    """
    magnitudes = E2M1_VALUES[:8]
    middles = torch.tensor([(a + b) / 2 for a, b in pairwise(magnitudes)], dtype=torch.float32)
    upper_is_even = torch.tensor([code % 2 == 0 for code in range(1, 8)])
    return torch.where(upper_is_even, torch.nextafter(middles, torch.zeros_like(middles)), middles).to(device)


@lru_cache(maxsize=32)
def _value_pairs(device: torch.device, dtype: torch.dtype) -> Tensor:
    """[256, 2]: the two values of a code byte."""
    pairs = [(E2M1_VALUES[byte & 15], E2M1_VALUES[byte >> 4]) for byte in range(256)]
    return torch.tensor(pairs, dtype=dtype, device=device)


@lru_cache(maxsize=32)
def _scale_table(device: torch.device, dtype: torch.dtype) -> Tensor:
    """The value of each e8m0 byte; 255 is NaN."""
    powers = [math.ldexp(1.0, byte - 127) for byte in range(255)] + [math.nan]
    return torch.tensor(powers, dtype=torch.float64).to(device, dtype)
