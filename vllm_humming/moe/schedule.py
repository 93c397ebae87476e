# SPDX-License-Identifier: Apache-2.0
"""Which compiled tile each GEMM of a layer runs with.

The host knows the number of tokens, not how they are routed, so it picks the tile that costs least for the row counts
that uniform routing would give. Into which widths each expert's rows are cut is then decided on the device, from their
real number (csrc/moe/cut.h; `Tile.cut` is the same): any choice made here is correct for any routing.

Cost model, in SM cycles: a GEMM is a number of tiles; a tile of `blocks` 64-row blocks and width w costs
`blocks * k_blocks * cycles[w]`, a start and an epilogue by its width, fitted to whole GEMMs on an H200
(docs/kernel-notes.md, "Measured"); tiles run in rounds of SMs x CTAs. Tiles that read sorted tokens
add the sorting copy. Where a measurement disagreed, measured.py has the last word.
"""

import argparse
import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations_with_replacement
from typing import get_args

from vllm_humming.moe import measured
from vllm_humming.moe.weight_formats import Path

SMS = 132
CLOCK_GHZ = 1.75
COPY_BYTES_PER_SECOND = 2.5e12  # the sorting copy is bound by its writes
COPY_LATENCY_CYCLES = 5400
TILE_CYCLES = 3000  # a tile's start
EPILOGUE_CYCLES = (26, 36)  # up and down, a token width of a 256-row tile
# Cost of a round with hardly any tiles, by CTAs an SM: those that run do so undisturbed.
LAST_ROUND = {1: 1.0, 2: 0.43, 3: 0.5, 4: 0.45}
# Standard normal quantiles: the rows of an expert under uniform routing are about Poisson.
_QUANTILES = (-1.47, -0.79, -0.37, 0.0, 0.37, 0.79, 1.47)


@dataclass(frozen=True)
class Tile:
    """A compiled tile: `blocks` x 64 weight rows by one of `widths` tokens, `ctas` CTAs an SM.

    `cycles[i]`: the SM time of one 64 x 128 weight chunk at `widths[i]`. `sorted_tokens`: the up GEMM reads a sorted
    copy of the tokens, of `token_bytes` an element. `path`: "a16" (activations of 16 bits) or "w4a8".
    """

    name: str
    blocks: int
    ctas: int
    sorted_tokens: bool
    widths: tuple[int, ...]
    cycles: tuple[int, ...]
    path: Path = "a16"
    token_bytes: int = 2

    @property
    def costs(self) -> tuple[int, ...]:
        """What cuts are chosen by: half cycles a chunk by width, with the share of an epilogue (32 cycles a width of
        256 rows) that one of 16 chunks has. A tile's start costs the same for any width, and cuts of the same rows have
        the same number of tiles. From K 768 to 7168 no tile has a better cut for that K (tests/test_cut.py)."""
        return tuple(2 * cycles + width for cycles, width in zip(self.cycles, self.widths, strict=True))

    def cut(self, rows: int) -> tuple[int, ...]:
        """The widths of the tiles that the rows of one expert are computed with, from wide to narrow.

        As few tiles as can be, which bounds the lists in the workspace, and the cheapest widths of all that hold the
        rows in these. What csrc/moe/cut.h does, and csrc/moe/tile_lists.cuh on the device.
        """
        widest = self.widths[-1]
        tiles = -(-rows // widest)
        unused = tiles * widest - rows
        # Each tile that is not the widest takes some of what is unused: there are never more than these.
        narrow = min(tiles, (widest - 1) // (widest - self.widths[-2]) if len(self.widths) > 1 else 0)
        return (widest,) * (tiles - narrow) + _cheapest_widths(self, narrow, unused)

    def chunk_cycles(self, rows: float) -> int:
        """SM cycles of a weight chunk for `rows` tokens of one expert."""
        return sum(self.cycles[self.widths.index(width)] for width in self.cut(math.ceil(rows)))

    def tiles(self, rows: float) -> int:
        """Token tiles of an expert with `rows` tokens."""
        return len(self.cut(math.ceil(rows)))

    def padded(self, rows: float) -> int:
        """Token widths that `rows` tokens of an expert are computed with, summed."""
        return sum(self.cut(math.ceil(rows)))


@lru_cache(maxsize=8192)
def _cheapest_widths(tile: Tile, tiles: int, unused: int) -> tuple[int, ...]:
    """The cheapest widths of `tiles` tiles, wide to narrow, that together are at most `unused` less than the widest.
    Of equally cheap ones those that csrc/moe/cut.h takes: the least Cut::narrow."""
    last = len(tile.widths) - 1
    least = tiles * tile.widths[-1] - unused
    cuts = (
        picked
        for picked in combinations_with_replacement(range(last, -1, -1), tiles)
        if sum(tile.widths[i] for i in picked) >= least
    )
    best = min(cuts, key=lambda picked: (sum(tile.costs[i] for i in picked), sum(32**i for i in picked if i < last)))
    return tuple(tile.widths[i] for i in best)


# The order of csrc/moe/tiles.cpp.
TILES = (
    Tile("64x16", 1, 4, False, (8, 16), (297, 332)),
    Tile("64x32", 1, 3, False, (8, 16, 24, 32), (308, 342, 417, 496)),
    Tile("128x48", 2, 3, True, (16, 32, 40, 48), (288, 303, 318, 338)),
    Tile("128x64", 2, 2, True, (16, 32, 48, 64), (304, 324, 348, 383)),
    Tile("128x96", 2, 2, True, (32, 64, 80, 96), (359, 424, 472, 520)),
    Tile("256x128", 4, 1, True, (32, 64, 96, 128), (344, 399, 479, 589)),
    Tile("256x160", 4, 1, True, (64, 96, 128, 160), (404, 473, 581, 729)),
    # Fitted to whole FP8 layers, 4 shapes x 12 batch sizes, every tile beside the chosen one of the other GEMM
    # (results/2026-11-30-h200-tiles-fp8.jsonl): off by 9 % (root mean square), with 4 us for what is no GEMM.
    Tile("f8-256x16", 4, 2, True, (8, 16), (188, 188), "w4a8", 1),
    Tile("f8-256x64", 4, 1, True, (16, 32, 48, 64), (206, 236, 284, 367), "w4a8", 1),
    Tile("f8-256x96", 4, 1, True, (48, 64, 80, 96), (295, 330, 350, 434), "w4a8", 1),
)


def _gemm_cycles(tile: Tile, experts: float, rows: list[float], row_blocks: int, k_blocks: int, epilogue: int) -> float:
    """Expected SM cycles of one GEMM with `experts` active experts of the (equally likely) row counts `rows`."""
    columns = math.ceil(row_blocks / tile.blocks)
    tiles = experts * columns * sum(tile.tiles(r) for r in rows) / len(rows)
    mean = sum(tile.chunk_cycles(r) for r in rows) / sum(tile.tiles(r) for r in rows)
    # CTAs take tiles as they come free; what is left over for the last round keeps only some of an SM's CTAs busy.
    rounds = tiles / (SMS * tile.ctas)
    rounds = max(1.0, sum(_whole(rounds * spread, LAST_ROUND[tile.ctas]) for spread in (0.98, 1.0, 1.02)) / 3)
    width = sum(tile.padded(r) for r in rows) / sum(tile.tiles(r) for r in rows)
    fixed = TILE_CYCLES + epilogue * width
    return rounds * tile.ctas * tile.blocks * (k_blocks * mean + fixed / 4)


def _whole(rounds: float, least: float) -> float:
    """Rounds, the last one counted as at least `least` of a full one."""
    full = math.floor(rounds)
    return full + (least + (1 - least) * (rounds - full) if rounds > full else 0.0)


def tiles_of(path: Path) -> list[int]:
    """Indices into TILES of a path's tiles."""
    return [index for index, tile in enumerate(TILES) if tile.path == path]


@lru_cache(maxsize=8192)
def select(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    hidden: int,
    intermediate: int,
    gated: bool = True,
    global_experts: int | None = None,
    path: Path = "a16",
) -> tuple[int, int]:
    """Indices into TILES for the up and the down GEMM, of tiles of that path.

    num_tokens: tokens of the batch. top_k: experts a token. num_experts: local experts. hidden, intermediate: sizes of
    the layer (intermediate padded to 128). global_experts: experts that the ids range over, more than num_experts under
    expert parallelism. Pure host arithmetic, cached: safe under graph capture.
    """
    return costs(num_tokens, top_k, num_experts, hidden, intermediate, gated, global_experts, path)[0]


def costs(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    hidden: int,
    intermediate: int,
    gated: bool = True,
    global_experts: int | None = None,
    path: Path = "a16",
) -> tuple[tuple[int, int], dict[int, tuple[float, float]]]:
    """What `select` picks, and the expected (up, down) microseconds of every tile of the path, by its index."""
    # Larger batches run in chunks of 16384 tokens; under expert parallelism a part of the entries lands here.
    share = num_experts / max(num_experts, global_experts or 0)
    load = _uniform_load(max(1.0, max(1, min(num_tokens, 16384)) * top_k * share), num_experts)
    up_n = intermediate * (2 if gated else 1)
    sides = (
        (up_n, hidden, _gemm_costs(load, up_n, hidden, EPILOGUE_CYCLES[0], path, copied=True)),
        (hidden, intermediate, _gemm_costs(load, hidden, intermediate, EPILOGUE_CYCLES[1], path, copied=False)),
    )
    up, down = (_cheapest(table, num_experts, n, k, load.mean, path) for n, k, table in sides)
    return (up, down), {index: (sides[0][2][index], sides[1][2][index]) for index in tiles_of(path)}


@lru_cache(maxsize=8192)
def select_gemm(num_rows: int, num_experts: int, n: int, k: int, path: Path = "a16", *, gathered: bool = False) -> int:
    """The index into TILES for one GEMM alone (`grouped_gemm`), of a tile of that path.

    num_rows: rows of all experts together. n, k: sizes of its weights. gathered: rows are read through a row list,
    which tiles for sorted tokens pay for with a copy. One expert has exactly num_rows rows; the rows of more are taken
    as uniform routing gives them. Pure host arithmetic, cached: safe under graph capture.
    """
    return gemm_costs(num_rows, num_experts, n, k, path, gathered=gathered)[0]


def gemm_costs(
    num_rows: int, num_experts: int, n: int, k: int, path: Path = "a16", *, gathered: bool = False
) -> tuple[int, dict[int, float]]:
    """What `select_gemm` picks, and the expected microseconds of every tile of the path, by its index."""
    rows = float(max(1, num_rows))
    load = _uniform_load(rows, num_experts) if num_experts > 1 else _Load(rows, 1.0, rows, [rows])
    table = _gemm_costs(load, n, k, EPILOGUE_CYCLES[1], path, copied=gathered)
    return _cheapest(table, num_experts, n, math.ceil(k / 128) * 128, load.mean, path), table


@dataclass(frozen=True)
class _Load:
    """entries: rows of all experts. active: experts that have any. mean: rows of one of these. rows: equally likely
    numbers of them."""

    entries: float
    active: float
    mean: float
    rows: list[float]


def _uniform_load(entries: float, num_experts: int) -> _Load:
    active = num_experts * (1.0 - (1.0 - 1.0 / num_experts) ** entries)
    mean = entries / active
    spread = math.sqrt(max(0.0, mean - 1.0))
    return _Load(entries, active, mean, [max(1.0, mean + z * spread) for z in _QUANTILES])


def _gemm_costs(load: _Load, n: int, k: int, epilogue: int, path: Path, *, copied: bool) -> dict[int, float]:
    """Expected microseconds of a GEMM by tile; copied: tiles for sorted tokens have them copied first."""
    copy_per_byte = load.entries * k / COPY_BYTES_PER_SECOND * CLOCK_GHZ * 1e9
    table = {}
    for index in tiles_of(path):
        tile = TILES[index]
        cycles = _gemm_cycles(tile, load.active, load.rows, math.ceil(n / 64), math.ceil(k / 128), epilogue)
        if copied and tile.sorted_tokens:
            cycles += copy_per_byte * tile.token_bytes + COPY_LATENCY_CYCLES
        table[index] = cycles / CLOCK_GHZ / 1e3
    return table


def _cheapest(table: dict[int, float], num_experts: int, n: int, k: int, mean: float, path: Path) -> int:
    """The recorded tile of that GEMM, else the one that costs least."""
    name = measured.tile_for(num_experts, n, k, mean, path)
    return next(i for i in table if TILES[i].name == name) if name else min(table, key=lambda index: table[index])


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, found {value}")
    return value


def main() -> None:
    """Prints the expected cost of every tile of a path, and the choice."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    for name in ("tokens", "top_k", "experts", "hidden", "intermediate"):
        parser.add_argument(name, type=_positive)
    parser.add_argument("--path", choices=get_args(Path), default="a16")
    args = parser.parse_args()
    intermediate = math.ceil(args.intermediate / 128) * 128
    choice, table = costs(args.tokens, args.top_k, args.experts, args.hidden, intermediate, path=args.path)
    print(f"{'tile':<12}{'up us':>10}{'down us':>10}")
    for index, (up, down) in table.items():
        marks = " up" * (index == choice[0]) + " down" * (index == choice[1])
        print(f"{TILES[index].name:<12}{up:>10.1f}{down:>10.1f}{marks}")


if __name__ == "__main__":
    main()
