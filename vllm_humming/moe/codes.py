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


class CodeLayout(NamedTuple):
    """The place of each code in the words of a chunk.

    order: codes in packed row order are [block, warp, half, g, chunk, half_k, b4, b3, b2, b1, b0], b4..b0 the bits of a
    byte's place among the 32 of its half_k; the words want these dimensions as
    [fragment 2 x 2, block, chunk, half_k, warp, g, q 2 x 2, word 2 x 2].
    magnitude_bits, sign_bits: by fragment and nibble (low first) of its byte, the lowest magnitude bit and the sign bit
    in the word.
    """

    order: tuple[int, ...]
    magnitude_bits: tuple[tuple[int, int], ...]
    sign_bits: tuple[tuple[int, int], ...]


def _in_lanes(bits: tuple[int, int, int, int]) -> tuple[tuple[int, int], ...]:
    """Bits of fragments in a 16-bit lane, even k in the low lane."""
    return tuple((bit, bit + 16) for bit in bits)


# K within half_k: 16 step + 8 k_high + 2 q + lane; fragment = (k_high, half), word = step.
_LANES_ORDER = (8, 2, 0, 4, 5, 1, 3, 9, 10, 6, 7)
BF16_CODES = CodeLayout(_LANES_ORDER, _in_lanes((6, 3, 0, 9)), _in_lanes((15, 12, 14, 13)))
FP16_CODES = CodeLayout(_LANES_ORDER, _in_lanes((9, 6, 3, 0)), _in_lanes((15, 12, 14, 13)))
# K within the chunk: 32 q + 8 step + 4 high + i; fragment = (high, i / 2), step / 2 in half_k's place, word =
# (step % 2, half).
E4M3_CODES = CodeLayout(
    (9, 10, 0, 4, 7, 1, 3, 5, 6, 8, 2), ((0, 4), (8, 12), (16, 20), (24, 28)), ((7, 15), (23, 31), (3, 11), (19, 27))
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
    magnitude, sign = _shifts(words.device, layout)
    words = words.reshape(1, 1, blocks, chunks, 2, 4, 8, 2, 2, 2, 2, 1)
    values = (words >> magnitude).bitwise_and_(7)
    values |= (words >> sign).bitwise_and_(1) << 3
    back = sorted(range(len(layout.order)), key=lambda dim: layout.order[dim])
    values = values.permute(*back, len(back)).reshape(-1)
    return _value_table(words.device, dtype).index_select(0, values).view(blocks * BLOCK_ROWS, chunks * CHUNK_K)


@lru_cache(maxsize=32)
def _word_table(device: torch.device, layout: CodeLayout) -> Tensor:
    """int32 [4, 256]: fragment and code byte (two codes) -> that fragment's bits of the word."""
    table = []
    for magnitude, sign in zip(layout.magnitude_bits, layout.sign_bits, strict=True):
        low, high = ([(code & 7) << magnitude[n] | (code >> 3) << sign[n] for code in range(16)] for n in range(2))
        words = [low[byte & 15] | high[byte >> 4] for byte in range(256)]
        table.append([word - (1 << 32) if word >> 31 else word for word in words])
    return torch.tensor(table, dtype=torch.int32, device=device)


@lru_cache(maxsize=32)
def _shifts(device: torch.device, layout: CodeLayout) -> tuple[Tensor, Tensor]:
    """int32 [fragment 2 x 2, 1 x 9, nibble 2] right shifts that bring magnitude and sign of a word's codes to bit 0."""
    shape = (2, 2, *(1,) * 9, 2)
    magnitude, sign = (torch.tensor(bits, dtype=torch.int32) for bits in (layout.magnitude_bits, layout.sign_bits))
    return magnitude.view(shape).to(device), sign.view(shape).to(device)


@lru_cache(maxsize=32)
def _value_table(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(E2M1_VALUES, dtype=dtype, device=device)
