# SPDX-License-Identifier: Apache-2.0
"""The FP4 weight formats: e2m1 codes, and what differs between them. docs/kernel-notes.md, section 2.

Packing, loading, the method, the reference and the op take a WeightFormat and know no format by name; a new format is
one more class here and a decode in the kernels. One that checkpoints store may be packed in more than one way.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from vllm_humming.moe import fp8, scales
from vllm_humming.moe.codes import BLOCK_ROWS, CHUNK_K, CODE_BYTES, E4M3_CODES, CodeLayout
from vllm_humming.moe.fp8 import Rounding
from vllm_humming.moe.scales import Window

Path = Literal["a16", "w4a8"]


class PackedGroups(NamedTuple):
    """codes uint8 [N, groups, group_k/2], even k in the low nibble; scales: packed bytes uint8 [N, groups]; row_scale
    fp32 [N].

    refused: bool [N], rows that are not to be packed, or None where there can be none; detail: int [N], what
    findings.Field says of them. rounding: what the weights lost, None where they never lose anything.
    """

    codes: Tensor
    scales: Tensor
    row_scale: Tensor
    refused: Tensor | None = None
    detail: Tensor | None = None
    rounding: Rounding | None = None


@dataclass(frozen=True)
class WeightFormat(ABC):
    """One FP4 format, as checkpoints store its scales and as the kernels' container holds them.

    name: as options and checkpoints' descriptions spell it. code: the op's weight_format. group_k: consecutive K that
    share a scale. scale_dtypes: dtypes that checkpoints may store the scales in; uint8 holds the raw bytes. has_global:
    whether an fp32 scale over all groups comes on top. one: the raw scale byte of 1.0. zero_group: a packed scale byte
    that is legal in both activation dtypes, for groups whose codes are all zero. path: "w4a8" where the kernels decode
    to e4m3 and quantise the activations, "a16" where weights take the activations' dtype.
    """

    name: str
    code: int
    group_k: int
    scale_dtypes: tuple[torch.dtype, ...]
    has_global: bool
    one: int
    zero_group: int
    path: Path = "a16"

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
        """Bytes of a packed chunk of 64 rows x 128 K."""
        return CODE_BYTES + self.scale_bytes

    def code_layout(self, window: Window) -> CodeLayout:
        """Where the codes lie in the words of a chunk."""
        return window.codes

    def raw_scales(self, where: str, stored: Tensor) -> Tensor:
        """Contiguous scales [N, groups] in any of scale_dtypes -> their raw bytes, uint8.

        Raises ValueError, its message started by where, for another dtype, an fp32 value that the format does not
        hold, and a scale that no weight may have (NaN; a negative one).
        """
        raw = self.scale_bytes_of(where, stored)
        illegal = self.illegal_scales(raw)
        if bool(illegal.any()):
            row, group = illegal.nonzero()[0].tolist()
            raise ValueError(f"{where} {self.scale_fault(row, group, int(raw[row, group]))}")
        return raw

    @abstractmethod
    def scale_bytes_of(self, where: str, stored: Tensor) -> Tensor:
        """raw_scales without looking for scales that no weight may have; waits for the device with fp32 alone."""

    @abstractmethod
    def illegal_scales(self, raw: Tensor) -> Tensor:
        """bool: which raw bytes no weight may have."""

    @abstractmethod
    def scale_fault(self, row: int, group: int, byte: int) -> str:
        """The rest of a message about an illegal raw byte."""

    @abstractmethod
    def pack_groups(self, codes: Tensor, raw: Tensor, global_scale: Tensor | None, window: Window) -> PackedGroups:
        """Codes uint8 [N, groups, group_k/2] and raw scales [N, groups] as the container holds them.

        global_scale: fp32 [N] or None, as has_global says. Rows that the activation dtype cannot hold exactly, or
        whose global scale cannot be, are in what it returns; so they are for illegal scales, with any contents.
        """

    @abstractmethod
    def packed_factors(self, window: Window) -> list[float]:
        """What each packed byte 0..255 multiplies an e2m1 value by; the row scale comes on top.

        Meaningful for the bytes that pack_groups writes.
        """

    @abstractmethod
    def legal_scales(self, window: Window) -> list[bool]:
        """Which packed bytes decode every code to a finite number that packed_factors describes."""

    @abstractmethod
    def small_scale(self, window: Window) -> int:
        """A legal byte of small weights."""


def _live(codes: Tensor) -> Tensor:
    """bool [N, groups]: which groups hold a non-zero code."""
    # Eight bytes at a time: a group has 8 or 16.
    words = (codes.clone() if codes.storage_offset() % 8 else codes).view(torch.int64)
    return (words & 0x7777777777777777).ne(0).any(-1)


@dataclass(frozen=True)
class _Mxfp4(WeightFormat):
    """OCP Microscaling Formats v1.0: an e8m0 scale a group of 32."""

    def scale_bytes_of(self, where: str, stored: Tensor) -> Tensor:
        return scales.e8m0_bytes(where, stored)

    def illegal_scales(self, raw: Tensor) -> Tensor:
        return raw == 255

    def scale_fault(self, row: int, group: int, byte: int) -> str:
        return scales.e8m0_fault(row, group)

    def pack_groups(self, codes: Tensor, raw: Tensor, global_scale: Tensor | None, window: Window) -> PackedGroups:
        packed, exponent, outside, span = scales.window_scales(raw, _live(codes), window, self.zero_group)
        row_scale = scales.power_table(raw.device, torch.float32, 128).index_select(0, exponent + 128)
        return PackedGroups(codes, packed, row_scale, outside, span)

    def packed_factors(self, window: Window) -> list[float]:
        return scales.powers(window.offset)

    def legal_scales(self, window: Window) -> list[bool]:
        return [byte < window.infinite_exponent for byte in range(256)]

    def small_scale(self, window: Window) -> int:
        return window.infinite_exponent - 9  # 2^-7, as far as a row scale of 1 goes


@dataclass(frozen=True)
class _Mxfp4Fp8(_Mxfp4):
    """MXFP4 for FP8 activations: weights decode to e4m3, which has the scale in its exponent."""

    @property
    def label(self) -> str:
        return "MXFP4 for FP8"

    def code_layout(self, window: Window) -> CodeLayout:
        return E4M3_CODES

    def pack_groups(self, codes: Tensor, raw: Tensor, global_scale: Tensor | None, window: Window) -> PackedGroups:
        codes, exponents, row_scale, rounding = fp8.fold_scales(codes, raw, _live(codes))
        packed = ((exponents - fp8.LOWEST) * 8).to(torch.uint8)
        return PackedGroups(codes, packed, row_scale, rounding=rounding)

    def packed_factors(self, window: Window) -> list[float]:
        return [2.0 ** (byte // 8 + fp8.LOWEST) for byte in range(256)]

    def legal_scales(self, window: Window) -> list[bool]:
        return [byte % 8 == 0 and byte <= 8 * (fp8.HIGHEST - fp8.LOWEST) for byte in range(256)]

    def small_scale(self, window: Window) -> int:
        return 0


@dataclass(frozen=True)
class _Nvfp4(WeightFormat):
    """NVIDIA's NVFP4: an e4m3 scale a group of 16, and an fp32 scale an expert and projection."""

    def scale_bytes_of(self, where: str, stored: Tensor) -> Tensor:
        return scales.e4m3_bytes(where, stored)

    def illegal_scales(self, raw: Tensor) -> Tensor:
        return scales.illegal_e4m3(raw)

    def scale_fault(self, row: int, group: int, byte: int) -> str:
        return scales.e4m3_fault(row, group, byte)

    def pack_groups(self, codes: Tensor, raw: Tensor, global_scale: Tensor | None, window: Window) -> PackedGroups:
        assert global_scale is not None
        row_scale, refused = scales.global_row_scale(global_scale)
        codes = codes * (raw & 0x7F).ne(0)[..., None]  # the packed scale of a zero is that of another number
        table = scales.packed_e4m3_table(raw.device)
        packed = table.index_select(0, raw.reshape(-1).to(torch.int32)).view_as(raw)
        packed = torch.where(_live(codes), packed, self.zero_group)
        # as unsigned bits
        return PackedGroups(codes, packed, row_scale, refused, global_scale.view(torch.int32).long() & 0xFFFFFFFF)

    def packed_factors(self, window: Window) -> list[float]:
        return scales.packed_e4m3_values()

    def legal_scales(self, window: Window) -> list[bool]:
        return [byte < scales.PACKED_E4M3_FINITE for byte in range(256)]

    def small_scale(self, window: Window) -> int:
        return self.zero_group  # 2^-9, which the row scale makes up for


_E8M0 = (torch.uint8, torch.float8_e8m0fnu, torch.float32)
_E4M3 = (torch.uint8, torch.float8_e4m3fn, torch.float32)
MXFP4 = _Mxfp4("mxfp4", 0, 32, _E8M0, False, 127, 29)
NVFP4 = _Nvfp4("nvfp4", 1, 16, _E4M3, True, 0x38, scales.PACKED_E4M3_ONE)
MXFP4_FP8 = _Mxfp4Fp8("mxfp4_fp8", 2, 32, _E8M0, False, 127, -8 * fp8.LOWEST, "w4a8")

WEIGHT_FORMATS: dict[str, WeightFormat] = {fmt.name: fmt for fmt in (MXFP4, NVFP4, MXFP4_FP8)}
BY_CODE = {fmt.code: fmt for fmt in WEIGHT_FORMATS.values()}
# What checkpoints' formats are packed in for FP8 activations.
FOR_FP8: dict[WeightFormat, WeightFormat] = {MXFP4: MXFP4_FP8}


@lru_cache(maxsize=64)
def factor_table(device: torch.device, dtype: torch.dtype, weight_format: WeightFormat, window: Window) -> Tensor:
    """packed_factors as a tensor [256]; exact for every byte that pack_groups writes."""
    return torch.tensor(weight_format.packed_factors(window), dtype=torch.float64).to(device, dtype)
