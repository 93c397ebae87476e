# SPDX-License-Identifier: Apache-2.0
"""How the e2m1 codes of a chunk lie in its 32-bit words. docs/kernel-notes.md, section 2, "Codes".

Every word holds eight weights of one thread. Which ones, and at which bits, depends on what the thread decodes them to:
bf16, fp16 or e4m3.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK_ROWS = 64
CHUNK_K = 128
CODE_BYTES = BLOCK_ROWS * CHUNK_K // 2

# Values of the sixteen e2m1 codes, index = code (OCP MX v1.0, table 5); bit 3 is the sign.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


Bits = tuple[int, int, int, int]


class CodeLayout(NamedTuple):
    """The place of each code in the words of a chunk.

    order: codes in packed row order are [block, warp, half, g, chunk, half_k, b4, b3, b2, b1, b0], b4..b0 the bits of a
    byte's place among the 32 of its half_k; the words want these dimensions as
    [fragment 2 x 2, block, chunk, half_k, warp, g, q 2 x 2, word 2 x 2].
    bits: by fragment and nibble (low first) of its byte, the places in the word of the code's four bits, low first; the
    last is the sign.
    """

    order: tuple[int, ...]
    bits: tuple[tuple[Bits, Bits], ...]


def _in_lanes(*fragments: Bits) -> tuple[tuple[Bits, Bits], ...]:
    """Bits of fragments in a 16-bit lane, even k in the low lane."""
    return tuple((low, (low[0] + 16, low[1] + 16, low[2] + 16, low[3] + 16)) for low in fragments)


# K within half_k: 16 step + 8 k_high + 2 q + lane; fragment = (k_high, half), word = step.
_LANES_ORDER = (8, 2, 0, 4, 5, 1, 3, 9, 10, 6, 7)
BF16_CODES = CodeLayout(_LANES_ORDER, _in_lanes((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (13, 14, 10, 11)))
FP16_CODES = CodeLayout(_LANES_ORDER, _in_lanes((9, 10, 11, 15), (6, 7, 8, 12), (3, 4, 5, 14), (0, 1, 2, 13)))
# K within the chunk: 32 q + 8 step + 4 high + i; fragment = (high, i / 2), step / 2 in half_k's place, word =
# (step % 2, half).
E4M3_CODES = CodeLayout(
    (9, 10, 0, 4, 7, 1, 3, 5, 6, 8, 2),
    (
        ((0, 1, 2, 7), (4, 5, 6, 15)),
        ((8, 9, 10, 23), (12, 13, 14, 31)),
        ((16, 17, 18, 3), (20, 21, 22, 11)),
        ((24, 25, 26, 19), (28, 29, 30, 27)),
    ),
)


def code_words(codes: Tensor, layout: CodeLayout) -> Tensor:
    """uint8 [rows, K/2] in packed row order, even k in the low nibble -> int32 [rows / 64, K / 128, 1024]."""
    blocks, chunks = codes.shape[0] // BLOCK_ROWS, codes.shape[1] * 2 // CHUNK_K
    fragments = codes.view(blocks, 4, 2, 8, chunks, 2, 2, 2, 2, 2, 2).permute(layout.order).reshape(4, -1)
    words = None
    for fragment, table in zip(fragments, _word_table(codes.device, layout), strict=True):
        part = table.index_select(0, fragment.to(torch.int32))
        words = part if words is None else words.bitwise_or_(part)
    assert words is not None
    return words.view(blocks, chunks, CODE_BYTES // 4)


def code_values(words: Tensor, layout: CodeLayout, dtype: torch.dtype) -> Tensor:
    """int32 [rows / 64, K / 128, 1024] -> the codes' values in dtype, [rows, K] in packed row order."""
    blocks, chunks = words.shape[:2]
    words = words.reshape(1, 1, blocks, chunks, 2, 4, 8, 2, 2, 2, 2, 1)
    values = torch.zeros((), dtype=torch.int32, device=words.device)
    for bit, shift in enumerate(_shifts(words.device, layout)):
        values = values | (words >> shift).bitwise_and_(1) << bit
    back = sorted(range(len(layout.order)), key=lambda dim: layout.order[dim])
    values = values.permute(*back, len(back)).reshape(-1)
    return _value_table(words.device, dtype).index_select(0, values).view(blocks * BLOCK_ROWS, chunks * CHUNK_K)


@lru_cache(maxsize=32)
def _word_table(device: torch.device, layout: CodeLayout) -> Tensor:
    """int32 [4, 256]: fragment and code byte (two codes) -> that fragment's bits of the word."""
    table = []
    for nibbles in layout.bits:
        low, high = ([sum((code >> i & 1) << at[i] for i in range(4)) for code in range(16)] for at in nibbles)
        words = [low[byte & 15] | high[byte >> 4] for byte in range(256)]
        table.append([word - (1 << 32) if word >> 31 else word for word in words])
    return torch.tensor(table, dtype=torch.int32, device=device)


@lru_cache(maxsize=32)
def _shifts(device: torch.device, layout: CodeLayout) -> Tensor:
    """int32 [bit 4, fragment 2 x 2, 1 x 9, nibble 2] right shifts that bring that bit of a word's codes to bit 0."""
    shifts = torch.tensor(layout.bits, dtype=torch.int32).permute(2, 0, 1)
    return shifts.reshape(4, 2, 2, *(1,) * 9, 2).to(device)


@lru_cache(maxsize=32)
def _value_table(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(E2M1_VALUES, dtype=dtype, device=device)
