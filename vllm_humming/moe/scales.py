# SPDX-License-Identifier: Apache-2.0
"""Group scales of the packed layout: e8m0 bytes, row scales and the exact exponent window of each activation dtype.

docs/kernel-notes.md, section 2, "Group scales".
"""

from typing import NamedTuple

import torch
from torch import Tensor

# A scale byte that is legal in both activation dtypes, for groups whose codes are all zero.
ZERO_GROUP_BYTE = 29


class Window(NamedTuple):
    """How an activation dtype holds codes and scales: scale 2^s in a row scaled by 2^b is the byte s - b + offset."""

    name: str
    magnitude_bits: tuple[int, int, int, int]  # lowest magnitude bit of fragments 0..3 in a 16-bit lane
    sign_bits: tuple[int, int, int, int]  # sign bit of fragments 0..3 in a 16-bit lane
    offset: int
    lowest: int  # smallest s - b for which 0.5 * 2^(s - b) is still exact


HIGHEST = 1  # largest s - b kept
WINDOWS = {
    torch.bfloat16: Window("bfloat16", (6, 3, 0, 9), (15, 12, 14, 13), 126 + 127, -132),
    torch.float16: Window("float16", (9, 6, 3, 0), (15, 12, 14, 13), 14 + 15, -23),
}


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


def refuse_nan(where: str, scales: Tensor) -> None:
    """Raises ValueError, its message started by where, for an e8m0 NaN (255) in scales, uint8 [N, groups]."""
    nan = scales == 255
    if bool(nan.any()):
        row, group = nan.nonzero()[0].tolist()
        raise ValueError(
            f"{where} scale of row {row}, group {group} is the e8m0 NaN (255), expected 0..254; "
            "the checkpoint is damaged or was not loaded completely"
        )


def window_scales(where: str, scales: Tensor, live: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    """e8m0 scales uint8 [N, groups] -> (packed scale bytes uint8 [N, groups], row exponents b int32 [N]).

    live: bool [N, groups], whether a group holds a non-zero code. Raises ValueError, its message started by where,
    for an e8m0 NaN (255) in any group and for a row whose live groups span more than the window.
    """
    s = scales.to(torch.int32) - 127
    s_max = torch.where(live, s, -1000).amax(1)
    s_min = torch.where(live, s, 1000).amin(1)
    shift = live.any(1) & ((s_max > HIGHEST) | (s_min < window.lowest))
    b = torch.where(shift, s_max - HIGHEST, 0)
    nan = scales == 255
    outside = s_min - b < window.lowest
    if bool(nan.any() | outside.any()):
        refuse_nan(where, scales)
        row = int(outside.nonzero()[0, 0])
        low, high = int(s_min[row]), int(s_max[row])
        fix = "serve it with --dtype bfloat16" if window.name == "float16" else "no activation dtype holds it"
        raise ValueError(
            f"{where} row {row}: scale exponents {low}..{high} span {high - low}, more than the "
            f"{HIGHEST - window.lowest} that {window.name} decodes exactly; {fix}"
        )
    return torch.where(live, s - b[:, None] + window.offset, ZERO_GROUP_BYTE).to(torch.uint8), b
