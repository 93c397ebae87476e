# SPDX-License-Identifier: Apache-2.0
"""Group scales of the packed layout: e8m0 and e4m3 bytes, row scales, the exact window of each activation dtype.

docs/kernel-notes.md, section 2, "Group scales".
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_humming.moe.codes import BF16_CODES, FP16_CODES, CodeLayout


class Window(NamedTuple):
    """How an activation dtype holds codes and e8m0 scales: 2^s in a row scaled by 2^b is the byte s - b + offset."""

    name: str
    codes: CodeLayout
    offset: int
    lowest: int  # smallest s - b for which 0.5 * 2^(s - b) is still exact
    infinite_exponent: int  # the exponent field of infinity and NaN


HIGHEST = 1  # largest s - b kept
WINDOWS = {
    torch.bfloat16: Window("bfloat16", BF16_CODES, 126 + 127, -132, 255),
    torch.float16: Window("float16", FP16_CODES, 14 + 15, -23, 31),
}

# A packed e4m3 scale: 1.mmm * 2^x is (x + 20) << 3 | mmm, and decodes to 1.mmm * 2^(x - 9) in both activation dtypes.
_E4M3_EXPONENT = 20
_GLOBAL_SHIFT = 9
PACKED_E4M3_ONE = _E4M3_EXPONENT << 3
PACKED_E4M3_FINITE = 31 << 3  # from here on the factor is infinity or NaN
_TINY = torch.finfo(torch.float32).tiny


def window_of(dtype: torch.dtype) -> Window:
    """Raises ValueError unless dtype is bfloat16 or float16."""
    if dtype not in WINDOWS:
        raise ValueError(f"activations must be torch.bfloat16 or torch.float16, found {dtype}")
    return WINDOWS[dtype]


def e8m0_bytes(where: str, scales: Tensor) -> Tensor:
    """Contiguous [N, groups] scales as uint8 e8m0, from uint8, float8_e8m0fnu or float32 holding exact powers of two.

    where starts the message of the ValueError that anything else raises.
    """
    if scales.dtype == torch.uint8:
        return scales
    if scales.dtype == torch.float8_e8m0fnu:
        return scales.view(torch.uint8)
    if scales.dtype != torch.float32:
        raise ValueError(f"{where} scales must be uint8, float8_e8m0fnu or float32, found {scales.dtype}")
    bits = scales.view(torch.int32)
    exponent = bits >> 23  # the sign ends up as a negative exponent
    lowest = bits == 1 << 22  # 2^-127, subnormal in float32
    legal = lowest | ((bits & 0x7FFFFF).eq(0) & exponent.ge(1) & exponent.le(254))
    if not bool(legal.all()):
        row, group = (~legal).nonzero()[0].tolist()
        raise ValueError(
            f"{where} scales must be exact powers of two in 2^-127..2^127, "
            f"found {scales[row, group].item()} in row {row}, group {group}"
        )
    return torch.where(lowest, 0, exponent).to(torch.uint8)


def e8m0_fault(row: int, group: int) -> str:
    """What is wrong with the only e8m0 byte that is no scale."""
    return (
        f"scale of row {row}, group {group} is the e8m0 NaN (255), expected 0..254; "
        "the checkpoint is damaged or was not loaded completely"
    )


def window_scales(
    scales: Tensor, live: Tensor, window: Window, zero_group: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """e8m0 scales uint8 [N, groups], no NaN -> (packed bytes uint8 [N, groups], row exponents b int32 [N], rows that
    the window does not hold bool [N], their smallest and largest live scale as smallest << 8 | largest int32 [N]).

    live: bool [N, groups], whether a group holds a non-zero code; the others get the byte zero_group.
    """
    s = scales.to(torch.int32) - 127
    s_max = torch.where(live, s, -1000).amax(1)
    s_min = torch.where(live, s, 1000).amin(1)
    shift = live.any(1) & ((s_max > HIGHEST) | (s_min < window.lowest))
    b = torch.where(shift, s_max - HIGHEST, 0)
    packed = torch.where(live, s - b[:, None] + window.offset, zero_group).to(torch.uint8)
    return packed, b, s_min - b < window.lowest, (s_min + 127) * 256 + s_max + 127


def window_fault(row: int, low: int, high: int, window: Window) -> str:
    """What is wrong with a row whose live scales are 2^low..2^high."""
    fix = "serve it with --dtype bfloat16" if window.name == "float16" else "no activation dtype holds it"
    return (
        f"row {row}: scale exponents {low}..{high} span {high - low}, more than the "
        f"{HIGHEST - window.lowest} that {window.name} decodes exactly; {fix}"
    )


def e4m3_bytes(where: str, scales: Tensor) -> Tensor:
    """Contiguous [N, groups] scales as raw e4m3 (FN) bytes, from uint8, float8_e4m3fn or float32 holding e4m3 values.

    where starts the message of the ValueError that anything else raises.
    """
    if scales.dtype == torch.uint8:
        return scales
    if scales.dtype == torch.float8_e4m3fn:
        return scales.view(torch.uint8)
    if scales.dtype != torch.float32:
        raise ValueError(f"{where} scales must be uint8, float8_e4m3fn or float32, found {scales.dtype}")
    rounded = scales.to(torch.float8_e4m3fn)
    illegal = rounded.float() != scales  # NaN and infinity, too
    if bool(illegal.any()):
        row, group = illegal.nonzero()[0].tolist()
        raise ValueError(
            f"{where} scales must be exact e4m3 values (0, 2^-9..448), "
            f"found {scales[row, group].item()} in row {row}, group {group}"
        )
    return rounded.view(torch.uint8)


def illegal_e4m3(scales: Tensor) -> Tensor:
    """Which e4m3 bytes are below zero or NaN. -0.0 is zero."""
    return (scales & 0x7F).eq(0x7F) | scales.gt(0x80)


def e4m3_fault(row: int, group: int, byte: int) -> str:
    """What is wrong with an illegal_e4m3 byte."""
    value = torch.tensor(byte, dtype=torch.uint8).view(torch.float8_e4m3fn).float().item()
    return (
        f"scale of row {row}, group {group} is {value} (byte {byte:#04x}), expected an "
        "e4m3 number from 0 to 448; the checkpoint is damaged or was not loaded completely"
    )


def global_row_scale(global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Global scales fp32 [N] -> (row scales fp32 [N], which are refused bool [N]).

    A row scale is exactly 2^9 times as large: packed e4m3 scales are 2^9 too small. Refused are those that are not
    positive and finite or leave fp32's normal range.
    """
    row_scale = global_scale * float(1 << _GLOBAL_SHIFT)
    return row_scale, ~(row_scale.isfinite() & row_scale.ge(_TINY))


def global_scale_fault(value: float) -> str:
    """What is wrong with a global scale that is refused."""
    if not 0 < value < math.inf:
        return f"global scale must be positive and finite, found {value}"
    return (
        f"global scale must be in 2^-135..2^119, where its product with 2^{_GLOBAL_SHIFT} is a normal fp32 number, "
        f"found {value}"
    )


def powers(offset: int) -> list[float]:
    """2^(i - offset) for i in 0..255 (0 where even float64 underflows)."""
    return [math.ldexp(1.0, i - offset) for i in range(256)]


@lru_cache(maxsize=64)
def power_table(device: torch.device, dtype: torch.dtype, offset: int) -> Tensor:
    """powers(offset) as a tensor, exact (0 where dtype underflows)."""
    return torch.tensor(powers(offset), dtype=torch.float64).to(device, dtype)


def packed_e4m3_values() -> list[float]:
    """What the kernels make of each packed e4m3 scale: 1.mmm * 2^(E - 29)."""
    return [math.ldexp(8 + (p & 7), (p >> 3) - _E4M3_EXPONENT - _GLOBAL_SHIFT - 3) for p in range(256)]


@lru_cache(maxsize=32)
def packed_e4m3_table(device: torch.device) -> Tensor:
    """uint8 [256]: raw e4m3 byte -> packed scale, subnormals normalised.

    Zero (which is no 1.mmm), NaN and negative bytes give PACKED_E4M3_ONE; they never scale a weight.
    """
    table = []
    for byte in range(256):
        exponent, mantissa = byte >> 3 & 15, byte & 7
        value = math.ldexp(mantissa + (8 if exponent else 0), max(exponent, 1) - 10)
        if byte >= 0x7F or value == 0:
            table.append(PACKED_E4M3_ONE)
            continue
        fraction, power = math.frexp(value)  # value = fraction * 2^power, 0.5 <= fraction < 1
        table.append((power - 1 + _E4M3_EXPONENT) << 3 | int(fraction * 16) - 8)
    return torch.tensor(table, dtype=torch.uint8, device=device)
