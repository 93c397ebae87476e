# SPDX-License-Identifier: Apache-2.0
"""Which compiled tile each GEMM of a layer runs with.

The host knows the number of tokens, not how they are routed, so it picks the tile that costs least for the row counts
that uniform routing would give. Into which widths each expert's rows are cut is then decided on the device, from their
real number (csrc/moe/cut.h; `Tile.cut` is the same): any choice made here is correct for any routing.

With 16-bit activations and up to 4096 entries, one tile for both GEMMs means that both run in one kernel
(csrc/moe/fused.cuh).

Cost model, in SM cycles: a GEMM is a number of tiles; a tile of `blocks` 64-row blocks and width w costs
`blocks * k_blocks * cycles[w]`, a start and an epilogue by its width, fitted to whole GEMMs on an H200
(docs/kernel-notes.md, "Measured"); CTAs take tiles as they come free, wide ones first, and in one kernel those of the
down GEMM behind those of the up GEMM. Tiles that read sorted tokens add the sorting copy. Where a measurement
disagreed, measured.py has the last word.

`python -m vllm_humming.moe.schedule TOKENS TOP_K EXPERTS HIDDEN INTERMEDIATE` prints what is chosen and why, with
`--seams` where the expected time jumps from one batch size to the next (seams.py).
"""

import argparse
import math
from bisect import insort
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations_with_replacement, permutations
from statistics import NormalDist
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
MOST_FUSED_ENTRIES = 4096  # kMostFusedEntries and kMostFewEntries in csrc/moe
MOST_FEW_ENTRIES = 64
MOST_GATHERED = 16  # tiles up to so wide gather their tokens in one kernel (kFusedGathers in csrc/moe/tile.cuh)
KERNEL_US = 1.5  # what a second kernel costs, where one would do
# Standard normal quantiles: the rows of an expert under uniform routing are about Poisson. As many as keep one more
# tile from being a jump of its own.
_QUANTILES = tuple(NormalDist().inv_cdf((i + 0.5) / 31) for i in range(31))


@dataclass(frozen=True)
class Tile:
    """A compiled tile: `blocks` x 64 weight rows by one of `widths` tokens, `ctas` CTAs an SM.

    `cycles[i]`: the time of one 64 x 128 weight chunk at `widths[i]` on what runs the tile, an SM or a cluster of
    `cluster` SMs. `sorted_tokens`: the up GEMM reads a sorted copy of the tokens, of `token_bytes` an element. `path`:
    "a16" (activations of 16 bits) or "w4a8". `least_k`: it is not picked for a shorter K. `few_apart`: few entries may
    run on it with a kernel for each GEMM and no routing kernel (kFewApart in csrc/moe/tile.cuh).
    """

    name: str
    blocks: int
    ctas: int
    sorted_tokens: bool
    widths: tuple[int, ...]
    cycles: tuple[int, ...]
    path: Path = "a16"
    token_bytes: int = 2
    cluster: int = 1
    least_k: int = 0
    few_apart: bool = False

    @property
    def at_once(self) -> int:
        """Tiles that run at the same time."""
        return SMS // self.cluster * self.ctas

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
        full, others = self.cut_parts(rows)
        return (self.widths[-1],) * full + others

    def cut_parts(self, rows: int) -> tuple[int, tuple[int, ...]]:
        """`cut` as the number of its first tiles, of the widest width, and the widths of the few others."""
        widest = self.widths[-1]
        tiles = -(-rows // widest)
        unused = tiles * widest - rows
        # Each tile that is not the widest takes some of what is unused: there are never more than these.
        others = min(tiles, (widest - 1) // (widest - self.widths[-2]) if len(self.widths) > 1 else 0)
        return tiles - others, _cheapest_widths(self, others, unused)


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


# The order and the cycles of csrc/moe/tiles.cpp.
TILES = (
    Tile("64x16", 1, 4, False, (8, 16), (255, 285), few_apart=True),
    Tile("64x16-3", 1, 3, False, (8, 16), (264, 294), few_apart=True),
    Tile("128x48", 2, 3, True, (16, 32, 40, 48), (268, 282, 296, 314)),
    Tile("128x64", 2, 2, True, (16, 32, 48, 64), (283, 301, 324, 356)),
    Tile("128x96", 2, 2, True, (32, 64, 80, 96), (359, 424, 472, 520)),
    Tile("256x128", 4, 1, True, (32, 64, 96, 128), (344, 399, 479, 589)),
    Tile("256x160", 4, 1, True, (64, 96, 128, 160), (404, 473, 581, 729)),
    Tile("256x16", 4, 2, True, (8, 16), (222, 256)),
    Tile("128x16-k2", 2, 1, False, (8, 16), (232, 266)),
    Tile("64x8-k4", 1, 1, False, (8,), (245,)),
    # Fitted to whole FP8 layers, 4 shapes x 12 batch sizes, every tile beside the chosen one of the other GEMM
    # (results/2026-11-30-h200-tiles-fp8.jsonl): off by 9 % (root mean square), with 4 us for what is no GEMM.
    Tile("f8-256x16", 4, 2, True, (8, 16), (188, 188), "w4a8", 1),
    Tile("f8-256x64", 4, 1, True, (16, 32, 48, 64), (206, 236, 284, 367), "w4a8", 1),
    Tile("f8-256x96", 4, 1, True, (48, 64, 80, 96), (295, 330, 350, 434), "w4a8", 1),
    Tile("f8-256x256", 4, 1, True, (64, 128, 192, 256), (228, 285, 350, 415), "w4a8", 1, cluster=2, least_k=640),
)


@dataclass(frozen=True)
class Load:
    """entries: rows of all experts. mean: rows of an expert that has any. experts: how many have how many rows, these
    rounded up to eights, of which all widths are multiples."""

    entries: float
    mean: float
    experts: dict[int, float]

    @property
    def active(self) -> float:
        return sum(self.experts.values())


def uniform_load(entries: float, num_experts: int) -> Load:
    """`entries` rows of random experts, each as likely as any."""
    active = num_experts * (1.0 - (1.0 - 1.0 / num_experts) ** entries)
    mean = entries / active
    spread = math.sqrt(max(0.0, mean - 1.0))
    experts: dict[int, float] = {}
    for z in _QUANTILES:
        rows = _eights(max(1.0, mean + z * spread))
        experts[rows] = experts.get(rows, 0.0) + active / len(_QUANTILES)
    return Load(entries, mean, experts)


def _eights(rows: float) -> int:
    return math.ceil(rows / 8) * 8


@dataclass(frozen=True)
class Layer:
    """A layer and its batch, as `select` takes them."""

    num_tokens: int
    top_k: int
    num_experts: int
    hidden: int
    intermediate: int
    gated: bool = True
    global_experts: int | None = None
    path: Path = "a16"

    @property
    def entries(self) -> int:
        return self.num_tokens * self.top_k

    @property
    def up_rows(self) -> int:
        """Weight rows of the up GEMM."""
        return self.intermediate * (2 if self.gated else 1)

    @cached_property
    def load(self) -> Load:
        # Larger batches run in chunks of 16384 tokens; under expert parallelism a part of the entries lands here.
        share = self.num_experts / max(self.num_experts, self.global_experts or 0)
        entries = max(1, min(self.num_tokens, 16384)) * self.top_k * share
        return uniform_load(max(1.0, entries), self.num_experts)


@dataclass(frozen=True)
class Expected:
    """What is expected of one GEMM with one tile.

    us: microseconds, of which copy_us for the sorting copy. even_us: what it would take if the CTAs shared the last
    tiles evenly. rounds: tiles over those that run at once. token_tiles: of all experts, by width; each is run for all
    `columns` tiles of weight rows. padded: their widths, summed.
    """

    us: float
    copy_us: float
    even_us: float
    rounds: float
    token_tiles: dict[int, float]
    columns: int

    @property
    def padded(self) -> float:
        return sum(width * number for width, number in self.token_tiles.items())


def _makespan(tiles: list[tuple[float, float]], at_once: int, least: float) -> float:
    """The time that `tiles`, of (duration, number) in order, take `at_once` CTAs, each of which takes the next one when
    it is done with one. least: what time with hardly any CTAs busy, after the first tile, counts; they run faster."""
    free = [(0.0, float(at_once))]  # CTAs by the time when they are free, ascending
    for duration, number in tiles:
        while number > 1e-6:
            if number >= at_once and free[-1][0] - free[0][0] <= duration:  # whole rounds keep the order
                rounds = number // at_once
                number -= rounds * at_once
                free = [(time + rounds * duration, ctas) for time, ctas in free]
                continue
            start, ctas = free[0]
            taken = min(number, ctas)
            number -= taken
            free[:1] = [(start, ctas - taken)] if ctas - taken > 1e-6 else []
            insort(free, (start + duration, taken))
    total = past = 0.0
    busy = float(at_once)
    for time, ctas in free:
        alone = max(0.0, time - max(past, tiles[0][0]))  # the part of it after the first tile
        span = time - past - alone + alone * (least + (1 - least) * busy / at_once)
        total += min(1.0, busy) * span  # less than one CTA: a chance of one
        busy -= ctas
        past = time
    return total


def _expected(load: Load, tile: Tile, n: int, k: int, epilogue: int, *, copied: bool) -> Expected:
    """copied: a tile for sorted tokens has them copied first."""
    token_tiles = _token_tiles(load, tile)
    timed = _timed(token_tiles, tile, n, k, epilogue)
    copy = _copy_us(load, tile, k) if copied and tile.sorted_tokens else 0.0
    us, even_us = (span + copy for span in _spans_us(timed, tile))
    rounds = sum(number for _, number in timed) / tile.at_once
    return Expected(us, copy, even_us, rounds, token_tiles, _columns(tile, n))


def _token_tiles(load: Load, tile: Tile) -> dict[int, float]:
    """Token tiles of all experts, by width, from wide to narrow."""
    token_tiles = dict.fromkeys(reversed(tile.widths), 0.0)
    for rows, experts in load.experts.items():
        full, others = tile.cut_parts(rows)
        token_tiles[tile.widths[-1]] += full * experts
        for width in others:
            token_tiles[width] += experts
    return {width: number for width, number in token_tiles.items() if number}


def _columns(tile: Tile, n: int) -> int:
    """Tiles of weight rows."""
    return math.ceil(math.ceil(n / 64) / tile.blocks)


def _timed(token_tiles: dict[int, float], tile: Tile, n: int, k: int, epilogue: int) -> list[tuple[float, float]]:
    """(cycles, number) of a GEMM's tiles, from wide to narrow."""
    k_blocks, columns = math.ceil(k / 128), _columns(tile, n)
    chunk = dict(zip(tile.widths, tile.cycles, strict=True))
    # All CTAs of an SM share it, so each takes as many times as long.
    return [
        (tile.ctas * tile.blocks * (k_blocks * chunk[width] + (TILE_CYCLES + epilogue * width) / 4), number * columns)
        for width, number in token_tiles.items()
    ]


def _spans_us(timed: list[tuple[float, float]], tile: Tile) -> tuple[float, float]:
    """The microseconds that tiles take, and what they would take if the CTAs shared the last ones evenly."""
    # Routing varies, so the number of tiles does.
    spans = [
        _makespan([(duration, number * spread) for duration, number in timed], tile.at_once, LAST_ROUND[tile.ctas])
        for spread in (0.98, 1.0, 1.02)
    ]
    even = sum(duration * number for duration, number in timed) / tile.at_once
    return sum(spans) / len(spans) / CLOCK_GHZ / 1e3, max(even, timed[0][0]) / CLOCK_GHZ / 1e3


def _copy_us(load: Load, tile: Tile, k: int) -> float:
    copied_bytes = load.entries * k * tile.token_bytes
    return copied_bytes / COPY_BYTES_PER_SECOND * 1e6 + COPY_LATENCY_CYCLES / CLOCK_GHZ / 1e3


def _one_kernel(layer: Layer, tile: Tile) -> tuple[float, float]:
    """The microseconds of both GEMMs in one kernel of that tile, and what they would be if the CTAs shared the last
    tiles evenly. A down tile's wait for its h is not in it."""
    token_tiles = _token_tiles(layer.load, tile)
    timed = _timed(token_tiles, tile, layer.up_rows, layer.hidden, EPILOGUE_CYCLES[0])
    timed += _timed(token_tiles, tile, layer.hidden, layer.intermediate, EPILOGUE_CYCLES[1])
    copies = tile.sorted_tokens and tile.widths[-1] > MOST_GATHERED
    copy = _copy_us(layer.load, tile, layer.hidden) if copies else 0.0
    us, even_us = _spans_us(timed, tile)
    return us + copy, even_us + copy


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
    layer = Layer(num_tokens, top_k, num_experts, hidden, intermediate, gated, global_experts, path)
    return choose(layer).tiles


@dataclass(frozen=True)
class Choice:
    """tiles: indices into TILES for the up and the down GEMM. one_kernel: both run in one. us: what is expected.
    even_us: the same if the CTAs shared the last tiles evenly. record: measured.LAYERS asked for these tiles."""

    tiles: tuple[int, int]
    one_kernel: bool
    us: float
    even_us: float
    record: bool = False


def choose(layer: Layer, *, records: bool = True) -> Choice:
    """What `select` picks, and what is expected of it. records: whether measured.py is asked."""
    apart, table = expected(layer, records=records)
    entries, up_rows = layer.entries, layer.up_rows
    may_be_one = layer.path == "a16" and entries <= MOST_FUSED_ENTRIES
    few = may_be_one and entries <= MOST_FEW_ENTRIES

    def choice(up: int, down: int, record: bool = False) -> Choice:
        if may_be_one and up == down:
            return Choice((up, down), True, *_one_kernel(layer, TILES[up]), record)
        gemms = table[up][0], table[down][1]
        extra = KERNEL_US if may_be_one else 0.0
        us, even_us = (extra + sum(times) for times in zip(*((gemm.us, gemm.even_us) for gemm in gemms), strict=True))
        return Choice((up, down), False, us, even_us, record)

    if may_be_one and layer.gated and records:
        found = measured.layer_tiles(layer.num_experts, layer.hidden, layer.intermediate, layer.load.mean)
        if found is not None:
            up, down = map(tile_named, found)
            # Two kernels of few entries only where they need no routing kernel, as when they were measured.
            if up == down or not few or few_apart(entries, up_rows, up):
                return choice(up, down, record=True)
    pairs = [apart]
    if few:
        # Without a routing kernel: one kernel of a tile that gathers its tokens anyway, or two of unlike 64-row tiles
        # that have few tiles to run (csrc/moe/layer.cpp).
        alone = [index for index in table if not TILES[index].sorted_tokens]
        small = [index for index in alone if TILES[index].few_apart]
        pairs = [(index, index) for index in alone]
        pairs += [pair for pair in permutations(small, 2) if few_apart(entries, up_rows, pair[0])]
    elif may_be_one:
        # These save the sorting copy in one kernel.
        pairs += [(index, index) for index in table if TILES[index].widths[-1] <= MOST_GATHERED]
    return min((choice(*pair) for pair in pairs), key=lambda choice: choice.us)


def few_apart(entries: int, up_rows: int, up: int) -> bool:
    """Whether two kernels, the up GEMM's with that tile, run a layer of few entries without a routing kernel."""
    return entries * math.ceil(up_rows / (64 * TILES[up].blocks)) <= 2 * TILES[up].at_once


def tile_named(name: str) -> int:
    """Its index into TILES."""
    return next(index for index, tile in enumerate(TILES) if tile.name == name)


def expected(layer: Layer, *, records: bool = True) -> tuple[tuple[int, int], dict[int, tuple[Expected, Expected]]]:
    """The tiles for two kernels, and what is expected of the up and the down GEMM with every tile of the path. records:
    whether measured.RECORDS has the last word on the tiles."""
    load, experts, path = layer.load, layer.num_experts, layer.path
    up_n, hidden, intermediate = layer.up_rows, layer.hidden, layer.intermediate
    sides = (
        (up_n, hidden, _gemms(load, up_n, hidden, EPILOGUE_CYCLES[0], path, copied=True)),
        (hidden, intermediate, _gemms(load, hidden, intermediate, EPILOGUE_CYCLES[1], path, copied=False)),
    )
    up, down = (_cheapest(table, experts, n, k, load.mean, path, records=records) for n, k, table in sides)
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
    load = uniform_load(rows, num_experts) if num_experts > 1 else Load(rows, rows, {_eights(rows): 1.0})
    table = _gemms(load, n, k, EPILOGUE_CYCLES[1], path, copied=gathered)
    choice = _cheapest(table, num_experts, n, math.ceil(k / 128) * 128, load.mean, path)
    return choice, {index: gemm.us for index, gemm in table.items()}


def _gemms(load: Load, n: int, k: int, epilogue: int, path: Path, *, copied: bool) -> dict[int, Expected]:
    return {index: _expected(load, TILES[index], n, k, epilogue, copied=copied) for index in tiles_of(path)}


def recorded(num_experts: int, n: int, k: int, mean: float, path: Path) -> int | None:
    """The tile that measured.py has for that GEMM (k padded to 128), if any. mean: rows of an active expert."""
    name = measured.tile_for(num_experts, n, k, mean, path)
    return tile_named(name) if name else None


def _cheapest(
    table: dict[int, Expected], num_experts: int, n: int, k: int, mean: float, path: Path, *, records: bool = True
) -> int:
    """The recorded tile of that GEMM, if records are asked, else the one that costs least."""
    record = recorded(num_experts, n, k, mean, path) if records else None
    if record is not None:
        return record
    return min((index for index in table if TILES[index].least_k <= k), key=lambda index: table[index].us)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, found {value}")
    return value


def _print_gemm(title: str, table: dict[int, Expected], choice: int, record: int | None) -> None:
    print(f"{title}\n{'tile':<12}{'us':>9}{'rounds':>8}{'idle %':>8}{'padded':>9}  tiles of a width, of all experts")
    for index, gemm in table.items():
        cuts = ", ".join(f"{number:.1f} x {width}" for width, number in gemm.token_tiles.items())
        mark = "  <- a record of measured.py" if index == record else "  <- the least" if index == choice else ""
        idle = 100 * (1 - gemm.even_us / gemm.us)
        print(f"{TILES[index].name:<12}{gemm.us:>9.1f}{gemm.rounds:>8.2f}{idle:>8.0f}{gemm.padded:>9.0f}  {cuts}{mark}")


def main() -> None:
    """Prints what is expected of every tile of a path for each GEMM of a layer in a kernel of its own, and the choice
    for the layer; or, with --seams, where the expected time of the chosen tiles jumps."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("tokens", type=_positive, help="with --seams: the most tokens")
    for name in ("top_k", "experts", "hidden", "intermediate"):
        parser.add_argument(name, type=_positive)
    parser.add_argument("--path", choices=get_args(Path), default="a16")
    parser.add_argument("--seams", action="store_true", help="walk 8, 16, .. TOKENS and print jumps of more than 5 %%")
    args = parser.parse_args()
    intermediate = math.ceil(args.intermediate / 128) * 128
    sizes = (args.top_k, args.experts, args.hidden, intermediate)
    if args.seams:
        from vllm_humming.moe import seams

        found = seams.find(range(8, args.tokens + 1, 8), *sizes, path=args.path)
        print("\n".join(map(str, found)) or f"no jump of more than {100 * seams.LIMIT:.0f} % beyond the added work")
        return
    layer = Layer(args.tokens, *sizes, path=args.path)
    apart, table = expected(layer)
    load = layer.load
    span = f"{min(load.experts)} to {max(load.experts)}"
    print(f"{load.active:.1f} active experts with {load.mean:.1f} rows each, {span} in eights")
    gemms = (("up", layer.up_rows, args.hidden), ("down", args.hidden, intermediate))
    for side, (title, n, k) in enumerate(gemms):
        record = recorded(args.experts, n, k, load.mean, args.path)
        tiles = {index: both[side] for index, both in table.items()}
        _print_gemm(f"{title}: N {n}, K {k}", tiles, apart[side], record)
    chosen = choose(layer)
    names = [TILES[index].name for index in chosen.tiles]
    kernels = f"both in one kernel: {names[0]}" if chosen.one_kernel else f"a kernel each: {names[0]} and {names[1]}"
    print(f"{kernels}, {chosen.us:.1f} us{', a record of measured.py' if chosen.record else ''}")


if __name__ == "__main__":
    main()
