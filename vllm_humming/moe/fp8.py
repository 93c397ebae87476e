# SPDX-License-Identifier: Apache-2.0
"""Both operands of the FP8 path as e4m3: MXFP4 weights with their scales folded in, activations in blocks of 128.

docs/kernel-notes.md, sections 1 and 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from vllm_humming.moe.codes import E2M1_VALUES
from vllm_humming.moe.scales import power_table

BLOCK_K = 128  # activations that share a scale
E4M3_MAX = 448.0
SMALLEST_AMAX = 2.0**-100  # keeps a block's scale and its inverse normal fp32 numbers
# A group 2^s in a row scaled by 2^b has d = s - b: 0.5 * 2^-5 is e4m3's smallest normal number, 6 * 2^6 = 384.
LOWEST, HIGHEST = -5, 6
_SMALLEST_B = -127 - HIGHEST


@dataclass(frozen=True)
class Rounding:
    """What packing took from the weights.

    groups: scale groups in which a weight changed, out of `total`. worst: the largest change of a weight, relative to
    the largest magnitude of its row.
    """

    groups: int
    total: int
    worst: float

    def __add__(self, other: Rounding) -> Rounding:
        return Rounding(self.groups + other.groups, self.total + other.total, max(self.worst, other.worst))


def fold_scales(codes: Tensor, scales: Tensor, live: Tensor) -> tuple[Tensor, Tensor, Tensor, Rounding]:
    """e8m0 scales as the exponents of e4m3 weights: (codes, d int32 [N, groups], row scales 2^b fp32 [N], Rounding).

    codes: uint8 [N, groups, 16]. scales: e8m0 bytes uint8 [N, groups], no NaN. live: bool [N, groups], whether a group
    holds a non-zero code. The largest live group of a row gets d = 6. Groups more than 2^11 below it have their codes
    rounded, to nearest even, at d = -5: a change of at most 2^-12 of the row's largest weight. Groups that are not live
    get d = 0.
    """
    s = scales.to(torch.int32) - 127
    s_max = torch.where(live, s, -1000).amax(1)
    b = torch.where(live.any(1), s_max - HIGHEST, 0)
    d = torch.where(live, s - b[:, None], 0)
    row_scale = power_table(codes.device, torch.float32, -_SMALLEST_B).index_select(0, b - _SMALLEST_B)
    deep = d < LOWEST
    rounding = Rounding(0, d.numel(), 0.0)
    if bool(deep.any()):
        codes, rounding = _rounded(codes, d, deep)
    return codes, d.clamp(min=LOWEST), row_scale, rounding


def _rounded(codes: Tensor, d: Tensor, deep: Tensor) -> tuple[Tensor, Rounding]:
    rounded, change = _rounding_tables(codes.device)
    places = codes[deep].to(torch.int32) + 256 * (LOWEST - d[deep]).clamp(max=_DEPTHS)[:, None]
    result = codes.clone()
    result[deep] = rounded[places]
    powers = power_table(codes.device, torch.float64, 249)  # d is in -248..6
    rows = deep.any(1)
    magnitudes = codes[rows] & 0x77  # e2m1 magnitudes are in the order of their bits
    largest = torch.maximum(magnitudes & 7, magnitudes >> 4).amax(2).to(torch.int32)
    largest = _magnitudes(codes.device)[largest] * powers[d[rows] + 249]
    worst = change[places].amax(1) * powers[d[deep] + 249]
    of_row = torch.zeros(codes.shape[0], dtype=torch.float64, device=codes.device)
    of_row[rows] = largest.amax(1)
    relative = worst / of_row[deep.nonzero()[:, 0]]
    return result, Rounding(int((worst > 0).sum()), d.numel(), float(relative.max()))


_DEPTHS = 5  # 6 * 2^-5 rounds to zero, as do all deeper ones


@lru_cache(maxsize=32)
def _rounding_tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """For a code byte at 256 * depth: the byte whose values are nearest 2^-depth times as large, uint8 [1536], and the
    larger of its two weights' changes, float64 [1536], in units of the group's own scale.

    At _DEPTHS the change is that of every deeper group, too: the weight itself.
    """
    codes, changes = [], []
    for depth in range(_DEPTHS + 1):
        nearest = [_nearest(E2M1_VALUES[code & 7] * 2.0**-depth) | code & 8 for code in range(16)]
        change = [abs(E2M1_VALUES[new] * 2.0**depth - E2M1_VALUES[code]) for code, new in enumerate(nearest)]
        codes += [nearest[high] << 4 | nearest[low] for high, low in product(range(16), repeat=2)]
        changes += [max(change[high], change[low]) for high, low in product(range(16), repeat=2)]
    return (
        torch.tensor(codes, dtype=torch.uint8, device=device),
        torch.tensor(changes, dtype=torch.float64, device=device),
    )


def _nearest(magnitude: float) -> int:
    """The e2m1 code nearest to a magnitude; a tie goes to the even one."""
    return min(range(8), key=lambda code: (abs(E2M1_VALUES[code] - magnitude), code % 2))


@lru_cache(maxsize=32)
def _magnitudes(device: torch.device) -> Tensor:
    """float64 [8]: the e2m1 magnitudes."""
    return torch.tensor(E2M1_VALUES[:8], dtype=torch.float64, device=device)


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, K] (any float dtype) -> (e4m3 values as float32 [M, K], scales fp32 [M, ceil(K / 128)]).

    Per token and block of 128 K: amax in fp32, at least 2^-100; scale = amax / 448; a value is x * (448 / amax),
    rounded to nearest even, saturated at 448. A zero block gives zeros. A block that holds NaN gives NaN values and
    scale; one that holds infinity an infinite scale, zeros and NaN.
    """
    k = x.shape[1]
    blocks = torch.nn.functional.pad(x.float(), (0, -k % BLOCK_K)).unflatten(1, (-(-k // BLOCK_K), BLOCK_K))
    # clamp and amax both keep NaN
    amax = blocks.abs().amax(2).clamp(min=SMALLEST_AMAX)
    # a number over a tensor would be its reciprocal times the number, which is no correctly rounded quotient
    values = blocks * torch.full_like(amax, E4M3_MAX).div(amax)[:, :, None]
    # torch's conversion saturates nothing: it gives NaN from 464 on
    values = values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()
    return values.flatten(1)[:, :k], amax / E4M3_MAX


def round_activations(x: Tensor) -> Tensor:
    """x [M, K] as quantize_activations leaves it, in float64."""
    values, scales = quantize_activations(x)
    return values.double() * scales.double().repeat_interleave(BLOCK_K, 1)[:, : x.shape[1]]


def linear(x: Tensor, weight: Tensor, scales: Tensor | None = None) -> Tensor:
    """fp32 [M, N]: x [M, K] times the transpose of e4m3 weights [N, K] (as float32).

    scales: fp32 [M, ceil(K / 128)] where x is e4m3 already; otherwise x is quantised here. Each block of 128 K is
    summed in fp32, multiplied by the token's scale of that block, and added in fp32.
    """
    values, scales = quantize_activations(x) if scales is None else (x.float(), scales)
    acc = torch.zeros((x.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)
    for block, scale in enumerate(scales.unbind(1)):
        k = slice(block * BLOCK_K, (block + 1) * BLOCK_K)
        acc += (values[:, k] @ weight[:, k].T).mul_(scale[:, None])
    return acc
