# SPDX-License-Identifier: Apache-2.0
"""Which compiled tile each GEMM of a layer runs with.

The host knows the number of tokens, not how they are routed: it picks a tile family here. The token width of every tile
within the family is picked on the device, for each expert, from its real row count (csrc/moe/route.cu).
"""

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Tile:
    """A compiled tile: `blocks` x 64 weight rows by one of `widths` tokens."""

    name: str
    blocks: int
    widths: tuple[int, ...]


# The order of csrc/moe/tiles.cpp.
TILES = (
      Tile("64x16", 1, (8, 16)),
      Tile("64x32", 1, (8, 16, 24, 32)),
      Tile("128x64", 2, (16, 32, 48, 64)),
      Tile("256x64", 4, (16, 32, 48, 64)),
      Tile("256x128", 4, (32, 64, 128)),
      Tile("256x160", 4, (80, 160)),
)


@lru_cache(maxsize=4096)
def select(num_tokens: int, top_k: int, num_experts: int, hidden: int, intermediate: int) -> tuple[int, int]:
    """Indices into TILES of the up and down GEMM's tiles for a batch of `num_tokens` tokens."""
    rows = num_tokens * top_k / num_experts
    if rows <= 6:
        return 0, 0
    if rows <= 20:
        return 1, 1
    if rows <= 40:
        return 2, 2
    if rows <= 64:
        return 3, 3
    if rows <= 128:
        return 4, 4
    return 5, 5
