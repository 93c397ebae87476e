# SPDX-License-Identifier: Apache-2.0
"""What packing finds in the weights of one expert's projection, as pack_rows leaves it on the device.

Reading a result waits for the device, so packing raises nothing: it writes a few numbers an expert, which are read for
many experts at once. An expert with something to refuse keeps the packed bytes that it had.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from vllm_humming.moe.fp8 import Rounding
from vllm_humming.moe.scales import Window, global_scale_fault, window_fault
from vllm_humming.moe.weight_formats import WeightFormat

NONE = 2**63 - 1  # in the fields of what is refused


class Field(IntEnum):
    """The int64 of a record. Those of what is refused hold the first place: row << 32 | detail; csrc/moe/pack.h.

    SCALE: detail group << 8 | byte. BIAS: 0. GLOBAL: the bits of the fp32 value. WINDOW: smallest << 8 | largest e8m0
    byte. ROUNDED: groups in which a weight changed. WORST: the bits of the float64 that Rounding.worst is.
    """

    SCALE = 0
    BIAS = 1
    GLOBAL = 2
    WINDOW = 3
    ROUNDED = 4
    WORST = 5


REFUSED = (Field.SCALE, Field.BIAS, Field.GLOBAL, Field.WINDOW)
_CLEAR = [NONE] * len(REFUSED) + [0, 0]


@dataclass(frozen=True)
class Names:
    """How errors name a projection's tensors: the projection, its bias, and the tensors that its scales came in, each
    with as many of the `rows`, one below the other.
    """

    where: str
    bias: str
    shards: tuple[str, ...]
    rows: int

    def of_row(self, row: int) -> tuple[str, int]:
        """The tensor that holds a row, and the row in it."""
        rows = self.rows // len(self.shards)
        return self.shards[row // rows], row % rows


class Findings:
    """The records of many experts, int64 [experts, fields] on the device of their weights."""

    def __init__(self, experts: int, device: torch.device) -> None:
        self.clear = torch.tensor(_CLEAR, dtype=torch.int64, device=device)  # a record of nothing
        self.tensor = self.clear.repeat(experts, 1)
        self.records = self.tensor.unbind(0)

    def read(self) -> list[list[int]]:
        """Waits for the device, once."""
        found: list[list[int]] = self.tensor.tolist()
        return found


def first_place(bad: Tensor, detail: Tensor | int) -> Tensor:
    """bad bool [N] or [N, groups], detail int64 of that shape -> int64 []: the field of what is refused."""
    rows = torch.arange(bad.shape[0], device=bad.device).view(-1, *(1,) * (bad.dim() - 1))
    return torch.where(bad, (rows << 32) + detail, NONE).amin()


def refuses(found: list[int]) -> bool:
    """Whether a record has something to refuse."""
    return any(found[field] != NONE for field in REFUSED)


def refuse(found: list[int], names: Names, weight_format: WeightFormat, window: Window) -> None:
    """Raises ValueError for the first thing that a record refuses."""
    if found[Field.SCALE] != NONE:
        shard, row = names.of_row(found[Field.SCALE] >> 32)
        group, byte = found[Field.SCALE] >> 8 & 0xFFFFFF, found[Field.SCALE] & 0xFF
        raise ValueError(f"{shard} {weight_format.scale_fault(row, group, byte)}")
    if found[Field.BIAS] != NONE:
        raise ValueError(f"{names.bias} holds NaN or infinity")
    if found[Field.GLOBAL] != NONE:
        (value,) = struct.unpack("<f", struct.pack("<I", found[Field.GLOBAL] & 0xFFFFFFFF))
        raise ValueError(f"{names.where} {global_scale_fault(value)}")
    if found[Field.WINDOW] != NONE:
        row, low, high = found[Field.WINDOW] >> 32, found[Field.WINDOW] >> 8 & 0xFF, found[Field.WINDOW] & 0xFF
        raise ValueError(f"{names.where} {window_fault(row, low - 127, high - 127, window)}")


def rounding_of(found: list[int], total: int) -> Rounding:
    """What a record says was rounded, out of `total` groups."""
    (worst,) = struct.unpack("<d", struct.pack("<q", found[Field.WORST]))
    return Rounding(found[Field.ROUNDED], total, worst)
