# SPDX-License-Identifier: Apache-2.0
"""MXFP4 quantisation of dense weights: OCP Microscaling Formats (MX) v1.0, e2m1 elements, e8m0 scales, groups of 32."""

import math
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from vllm_humming.moe.packing import E2M1_VALUES, GROUP_K

_CHUNK_ELEMENTS = 1 << 22  # temporaries are a few times this many float32


def quantize_mxfp4(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises w [N, K] (any float dtype) to MXFP4: (codes uint8 [N, K/2], e8m0 scales uint8 [N, K/32]).

    Per group of 32 along K the scale is 2^(floor(log2(amax)) - 2), clamped to 2^-127..2^127; elements are rounded to
    nearest even and saturate at 6 (OCP MX v1.0, section 6.3). Even k in the low nibble. A zero group gets scale 1.
    Raises ValueError when w is not 2-D floating point, K is no multiple of 32, or w holds NaN or infinity.
    """
    if w.dim() != 2 or not w.dtype.is_floating_point:
        raise ValueError(f"MXFP4 quantisation needs a floating-point [N, K] tensor, found {w.dtype} {tuple(w.shape)}")
    n, k = w.shape
    if k % GROUP_K:
        raise ValueError(f"MXFP4 quantisation needs K to be a multiple of {GROUP_K}, found K = {k}")
    codes = torch.empty((n, k // 2), dtype=torch.uint8, device=w.device)
    scales = torch.empty((n, k // GROUP_K), dtype=torch.uint8, device=w.device)
    step = max(1, _CHUNK_ELEMENTS // max(k, 1))
    for start in range(0, n, step):
        rows = slice(start, start + step)
        _quantize_rows(w[rows], codes[rows], scales[rows], start)
    return codes, scales


def dequantize_mxfp4(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """MXFP4 [N, K/2] codes and [N, K/32] e8m0 scales (uint8) -> weights [N, K] in dtype.

    Exact in float64 and, below 2^128, in float32; other dtypes round once. An e8m0 NaN (255) gives NaN.
    Raises ValueError when the two shapes do not belong together.
    """
    n, half_k = codes.shape
    if tuple(scales.shape) != (n, half_k * 2 // GROUP_K) or half_k * 2 % GROUP_K:
        raise ValueError(f"scales {tuple(scales.shape)} do not belong to codes {tuple(codes.shape)}")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    out = torch.empty((n, half_k * 2), dtype=dtype, device=codes.device)
    values, powers = _value_pairs(codes.device, wide), _scale_table(codes.device, wide)
    step = max(1, _CHUNK_ELEMENTS // max(half_k * 2, 1))
    for start in range(0, n, step):
        rows = slice(start, start + step)
        part = values.index_select(0, codes[rows].reshape(-1).view(torch.uint8).to(torch.int32)).view(-1, GROUP_K)
        part.mul_(powers.index_select(0, scales[rows].reshape(-1).view(torch.uint8).to(torch.int32))[:, None])
        out[rows] = part.view(-1, half_k * 2)
    return out


def _quantize_rows(w: Tensor, codes: Tensor, scales: Tensor, first_row: int) -> None:
    groups = w.to(torch.float32, copy=True, memory_format=torch.contiguous_format).view(w.shape[0], -1, GROUP_K)
    amax = groups.abs().amax(-1)
    if not bool(amax.isfinite().all()):
        row = int((~amax.isfinite()).nonzero()[0, 0])
        raise ValueError(f"MXFP4 quantisation needs finite weights, found NaN or infinity in row {first_row + row}")
    _, exponent = torch.frexp(amax)  # amax = m * 2^exponent, 0.5 <= m < 1
    scale = torch.where(amax > 0, (exponent - 3).clamp(-127, 127), 0) + 127
    # 2^-s as a table look-up: exact, where exp2 need not be
    groups.mul_(_scale_table(w.device, torch.float32).index_select(0, 254 - scale.view(-1)).view_as(scale)[..., None])
    code = torch.bucketize(groups.abs(), _rounding_bounds(w.device), out_int32=True).to(torch.uint8)
    code |= torch.signbit(groups).to(torch.uint8) << 3
    code = code.view(w.shape[0], -1, 2)
    torch.bitwise_or(code[..., 0], code[..., 1] << 4, out=codes)
    scales.copy_(scale)


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
