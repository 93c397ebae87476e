# SPDX-License-Identifier: Apache-2.0
"""The FP4 weight formats: e2m1 codes, and what differs between them. docs/kernel-notes.md, section 2.

Packing, loading, the method, the reference and the op take a WeightFormat and know no format by name; a new format is
one more class here and a decode in the kernels.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from vllm_humming.moe import scales
from vllm_humming.moe.scales import Window

BLOCK_ROWS = 64
CHUNK_K = 128
CODE_BYTES = BLOCK_ROWS * CHUNK_K // 2

# Values of the sixteen e2m1 codes, index = code (OCP MX v1.0, table 5); bit 3 is the sign.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class WeightFormat(ABC):
    """One FP4 format, as checkpoints store its scales and as the kernels' container holds them.

    name: as options and checkpoints' descriptions spell it. code: the op's weight_format. group_k: consecutive K that
    share a scale. scale_dtypes: dtypes that checkpoints may store the scales in; uint8 holds the raw bytes. has_global:
    whether an fp32 scale over all groups comes on top. one: the raw scale byte of 1.0. zero_group: a packed scale byte
    that is legal in both activation dtypes, for groups whose codes are all zero.
    """

    name: str
    code: int
    group_k: int
    scale_dtypes: tuple[torch.dtype, ...]
    has_global: bool
    one: int
    zero_group: int

    @property
    def label(self) -> str:
        return self.name.upper()

    @property
    def chunk_groups(self) -> int:
        """Scales of one weight row in a chunk."""
        return CHUNK_K // self.group_k

    @property
    def scale_bytes(self) -> int:
        return BLOCK_ROWS * self.chunk_groups

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a packed chunk of 64 rows x 128 K. No two formats have the same."""
        return CODE_BYTES + self.scale_bytes

    @abstractmethod
    def raw_scales(self, where: str, stored: Tensor) -> Tensor:
        """Contiguous scales [N, groups] in any of scale_dtypes -> their raw bytes, uint8.

        Raises ValueError, its message started by where, for another dtype, an fp32 value that the format does not
        hold, and a scale that no weight may have (NaN; a negative one).
        """

    @abstractmethod
    def nonzero(self, raw: Tensor) -> Tensor | None:
        """Which raw scales are not zero, bool [N, groups]; None where the format has no zero scale."""

    @abstractmethod
    def pack_scales(
        self, where: str, raw: Tensor, live: Tensor, global_scale: Tensor | None, window: Window
    ) -> tuple[Tensor, Tensor]:
        """Raw scales [N, groups] -> (packed bytes uint8 [N, groups], row scale fp32 [N]).

        live: bool [N, groups], groups that hold a non-zero weight. global_scale: fp32 [N] or None, as has_global says.
        Raises ValueError, its message started by where, for scales that the activation dtype cannot hold exactly.
        """

    @abstractmethod
    def packed_factors(self, window: Window) -> list[float]:
        """What each packed byte 0..255 multiplies an e2m1 value by; the row scale comes on top.

        Meaningful for the bytes that pack_scales writes.
        """

    @abstractmethod
    def finite_bytes(self, window: Window) -> int:
        """How many packed bytes, from 0 up, decode to finite numbers."""


@dataclass(frozen=True)
class _Mxfp4(WeightFormat):
    """OCP Microscaling Formats v1.0: an e8m0 scale a group of 32."""

    def raw_scales(self, where: str, stored: Tensor) -> Tensor:
        raw = scales.e8m0_bytes(where, stored)
        scales.refuse_nan(where, raw)
        return raw

    def nonzero(self, raw: Tensor) -> Tensor | None:
        return None

    def pack_scales(
        self, where: str, raw: Tensor, live: Tensor, global_scale: Tensor | None, window: Window
    ) -> tuple[Tensor, Tensor]:
        packed, exponent = scales.window_scales(where, raw, live, window, self.zero_group)
        return packed, scales.power_table(raw.device, torch.float32, 128).index_select(0, exponent + 128)

    def packed_factors(self, window: Window) -> list[float]:
        return scales.powers(window.offset)

    def finite_bytes(self, window: Window) -> int:
        return window.infinite_exponent


@dataclass(frozen=True)
class _Nvfp4(WeightFormat):
    """NVIDIA's NVFP4: an e4m3 scale a group of 16, and an fp32 scale an expert and projection."""

    def raw_scales(self, where: str, stored: Tensor) -> Tensor:
        raw = scales.e4m3_bytes(where, stored)
        scales.refuse_negative_or_nan(where, raw)
        return raw

    def nonzero(self, raw: Tensor) -> Tensor | None:
        return (raw & 0x7F).ne(0)

    def pack_scales(
        self, where: str, raw: Tensor, live: Tensor, global_scale: Tensor | None, window: Window
    ) -> tuple[Tensor, Tensor]:
        assert global_scale is not None
        table = scales.packed_e4m3_table(raw.device)
        packed = table.index_select(0, raw.reshape(-1).to(torch.int32)).view_as(raw)
        return torch.where(live, packed, self.zero_group), scales.global_row_scale(where, global_scale)

    def packed_factors(self, window: Window) -> list[float]:
        return scales.packed_e4m3_values()

    def finite_bytes(self, window: Window) -> int:
        return scales.PACKED_E4M3_FINITE


MXFP4 = _Mxfp4("mxfp4", 0, 32, (torch.uint8, torch.float8_e8m0fnu, torch.float32), False, 127, 29)
NVFP4 = _Nvfp4("nvfp4", 1, 16, (torch.uint8, torch.float8_e4m3fn, torch.float32), True, 0x38, scales.PACKED_E4M3_ONE)

WEIGHT_FORMATS: dict[str, WeightFormat] = {fmt.name: fmt for fmt in (MXFP4, NVFP4)}
BY_CODE = {fmt.code: fmt for fmt in WEIGHT_FORMATS.values()}
_BY_CHUNK = {fmt.chunk_bytes: fmt for fmt in WEIGHT_FORMATS.values()}


def format_of_chunk(chunk_bytes: int) -> WeightFormat:
    """The format whose packed chunk has that many bytes. Raises ValueError for none."""
    if chunk_bytes not in _BY_CHUNK:
        known = ", ".join(f"{size} ({fmt.label})" for size, fmt in _BY_CHUNK.items())
        raise ValueError(f"a packed chunk has one of {known} bytes, found {chunk_bytes}")
    return _BY_CHUNK[chunk_bytes]


@lru_cache(maxsize=64)
def factor_table(device: torch.device, dtype: torch.dtype, weight_format: WeightFormat, window: Window) -> Tensor:
    """packed_factors as a tensor [256]; exact for every byte that pack_scales writes."""
    return torch.tensor(weight_format.packed_factors(window), dtype=torch.float64).to(device, dtype)
