# SPDX-License-Identifier: Apache-2.0
"""How the operators are told which rows of x belong to which expert, and the memory layouts of FP8 token scales."""

from collections.abc import Iterator
from enum import IntEnum
from itertools import pairwise

import torch
from torch import Tensor

from vllm_humming.moe.fp8 import BLOCK_K


class GemmLayout(IntEnum):
    """grouped_gemm's `layout` codes; E experts, R rows in all."""

    CONTIGUOUS = (
        0  # x [R, K] sorted by expert, out [R, N]; groups int32 [E + 1]: offsets; or None: one expert, all rows
    )
    MASKED = 1  # x [E, max, K], out [E, max, N]; groups int32 [E]: how many rows of each expert are valid
    INDEXED = 2  # x [M, K], rows int32 [R], out [R, N]; groups as in CONTIGUOUS: result row r is of x[rows[r]]


def expert_rows(
    layout: GemmLayout, groups: Tensor | None, experts: int, rows: int, most: int
) -> Iterator[tuple[int, slice]]:
    """(expert, its result rows) for each expert that has any; rows of MASKED are counted through all experts.

    rows: result rows in all; most: rows of one expert (MASKED). Reads groups on the host. Raises ValueError for offsets
    that descend or leave 0..rows and counts outside 0..most.
    """
    if groups is None:
        bounds = [(0, rows)]
    elif layout is GemmLayout.MASKED:
        counts = groups.tolist()
        if any(not 0 <= count <= most for count in counts):
            raise ValueError(f"groups must hold counts in 0..{most}, found {counts}")
        bounds = [(e * most, e * most + count) for e, count in enumerate(counts)]
    else:
        offsets = groups.tolist()
        if offsets != sorted(offsets) or offsets[0] < 0 or offsets[-1] > rows:
            raise ValueError(f"groups must hold ascending offsets in 0..{rows}, found {offsets}")
        bounds = list(pairwise(offsets))
    assert len(bounds) == experts
    for expert, (start, end) in enumerate(bounds):
        if end > start:
            yield expert, slice(start, end)


def scales_m_major(rows: tuple[int, ...], k: int, device: torch.device | str) -> Tensor:
    """fp32 [*rows, ceil(k / 128)] for token scales whose rows lie together in memory: stored [.., ceil(k / 128), M
    rounded up to 4], where M is the last of rows. The content is undefined."""
    *outer, m = rows
    stored = torch.empty((*outer, -(-k // BLOCK_K), -(-m // 4) * 4), dtype=torch.float32, device=device)
    return stored[..., :m].transpose(-1, -2)
