# SPDX-License-Identifier: Apache-2.0
"""How an expert's rows are cut into token tiles: schedule.py's account of it, and the device's code, compiled here."""

import math
import re
import subprocess
from itertools import combinations_with_replacement, product
from pathlib import Path

import pytest

from vllm_humming.moe import schedule
from vllm_humming.moe.schedule import TILES, Tile

CSRC = Path(__file__).resolve().parent.parent / "csrc"
every_tile = pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.name)
# What tables may look like that no tile has now: wider, concave or linear cycles, fewer widths.
OTHERS = (
    Tile("wide", 4, 1, True, (96, 128, 160, 192), (300, 330, 380, 470)),
    Tile("uneven", 4, 1, True, (64, 96, 128, 192), (300, 330, 380, 470)),
    Tile("concave", 2, 2, True, (8, 48, 56, 64), (100, 400, 401, 402)),
    Tile("linear", 2, 2, True, (16, 32, 48, 64), (16, 32, 48, 64)),
    Tile("one", 2, 2, True, (64,), (100,)),
    Tile("three", 2, 2, True, (40, 48, 72), (100, 101, 180)),
)


def cost(tile: Tile, widths: tuple[int, ...]) -> int:
    return sum(tile.costs[tile.widths.index(width)] for width in widths)


def widest_first(tile: Tile, rows: int) -> tuple[int, ...]:
    """As many of the widest as the rows fill, and one for the rest."""
    full, rest = divmod(rows, tile.widths[-1])
    return (tile.widths[-1],) * full + ((next(w for w in tile.widths if w >= rest),) if rest else ())


@pytest.mark.parametrize("tile", TILES + OTHERS, ids=lambda tile: tile.name)
def test_the_cut_is_the_cheapest_of_all_with_as_few_tiles(tile):
    widest = tile.widths[-1]
    assert tile.cut(0) == ()
    for rows in (*range(1, 4 * widest + 1), *range(4 * widest + 1, 8 * widest + 1, 8)):
        cut = tile.cut(rows)
        assert list(cut) == sorted(cut, reverse=True)
        assert len(cut) == math.ceil(rows / widest)
        assert sum(cut) >= rows > sum(cut[:-1])  # every tile has rows
        assert cost(tile, cut) <= cost(tile, widest_first(tile, rows))
        every = combinations_with_replacement(tile.widths, len(cut))
        assert cost(tile, cut) == min(cost(tile, widths) for widths in every if sum(widths) >= rows)
        # What few tiles can have, many can.
        assert cost(tile, tile.cut(rows + 50 * widest)) <= cost(tile, cut) + 50 * tile.costs[-1]


def test_what_was_dear_is_cut_otherwise():
    tile = next(tile for tile in TILES if tile.name == "256x160")
    assert [tile.cut(rows) for rows in (170, 256, 641)] == [(96, 96), (128, 128), (160, 128, 128, 128, 128)]


@every_tile
@pytest.mark.parametrize("k", [768, 2048, 7168])
@pytest.mark.parametrize("epilogue", schedule.EPILOGUE_CYCLES)
def test_no_k_has_a_better_cut(tile, k, epilogue):
    def cost_at(widths):
        of_chunks = k // 128 * sum(tile.cycles[tile.widths.index(width)] for width in widths)
        return 4 * of_chunks + epilogue * sum(widths)

    for rows in range(1, 4 * tile.widths[-1] + 1, 8):
        cut = tile.cut(rows)
        every = combinations_with_replacement(tile.widths, len(cut))
        assert cost_at(cut) == min(cost_at(widths) for widths in every if sum(widths) >= rows)


def test_lists_never_exceed_the_workspace():
    """Room (csrc/moe/layer.cpp, experts.cpp): min(rows, min(experts, rows) + rows / kLeastWidest)."""
    least = re.search(r"kLeastWidest = (\d+);", (CSRC / "moe/launch.h").read_text())
    assert least is not None
    for tile in TILES:
        widest = tile.widths[-1]
        assert widest >= int(least[1])
        counts = sorted({1, 2, widest - 1, widest, widest + 1, 2 * widest - 1, 2 * widest + 1, 5 * widest + 3})
        for experts in (1, 3):
            for rows in product(counts, repeat=experts):
                total = sum(rows)
                made = sum(len(tile.cut(count)) for count in rows)
                assert made <= min(total, min(experts, total) + total // widest)


def compiled(tmp_path: Path, source: str, *options: str) -> str:
    """What a C++ program prints."""
    (tmp_path / "test.cpp").write_text(source)
    command = ["g++", "-std=c++20", "-O1", "-Wall", "-Werror", f"-I{CSRC}", *options]
    subprocess.run([*command, "-o", tmp_path / "test", tmp_path / "test.cpp"], check=True)
    return subprocess.run([tmp_path / "test"], check=True, capture_output=True, text=True).stdout


def listed(values) -> str:
    return f"{{{', '.join(map(str, values))}}}"


CUTS = r"""
#include <cstdio>
#include "moe/cut.h"
using namespace vllm_humming;
template <int... Width>
struct Widths {
  static constexpr int kCount = sizeof...(Width), kAt[] = {Width...};
};
template <typename W>
void print(int number, const WidthList& list) {
  WidthList widths = list;
  const int cycles[][WidthList::kMost] = {CYCLES};
  widths.set_cycles(cycles[number]);
  for (int rows = 0; rows <= 8 * widths.max(); ++rows) {
    const Cut cut = widths.cut(rows);
    std::printf("%d %d", number, rows);
    for (int i = 0, row = 0; i < (rows + widths.max() - 1) / widths.max(); ++i) {
      const CutTile tile = cut_tile<W>(cut, i);
      std::printf(" %d", tile.row == row ? tile.width : -1);
      row += tile.width;
    }
    std::printf("\n");
  }
}
int main() { PRINTS }
"""


def test_the_devices_cut_is_the_schedules(tmp_path):
    tiles = TILES + OTHERS
    prints = " ".join(
        f"print<Widths<{', '.join(map(str, tile.widths))}>>({number}, {{{len(tile.widths)}, {listed(tile.widths)}}});"
        for number, tile in enumerate(tiles)
    )
    source = CUTS.replace("CYCLES", ", ".join(listed(tile.cycles) for tile in tiles)).replace("PRINTS", prints)
    printed = compiled(tmp_path, source, "-Wno-missing-field-initializers").splitlines()
    want = [
        " ".join(map(str, (number, rows, *tile.cut(rows))))
        for number, tile in enumerate(tiles)
        for rows in range(8 * tile.widths[-1] + 1)
    ]
    assert printed == want


# Threads of a block as threads of the host: what write_tiles needs of CUDA.
CUDA = r"""
#pragma once
#include <algorithm>
#include <atomic>
#define __align__(n) alignas(n)
#define __host__
#define __device__
#define __forceinline__ inline
using std::max;
using std::min;
inline thread_local struct { int x; } threadIdx;
inline int atomicAdd(int* at, int value) { return std::atomic_ref<int>(*at).fetch_add(value); }
"""
LISTS = r"""
#include <barrier>
#include <cstdio>
#include <random>
#include <thread>
#include <vector>
#include "moe/tile_lists.cuh"
using namespace vllm_humming;
int main() {
  constexpr int kExperts = 24;
  std::mt19937 random(1);
  WidthList lists[] = {LISTS};
  const int cycles[][WidthList::kMost] = {CYCLES};
  constexpr int kTiles = sizeof(lists) / sizeof(lists[0]);
  for (int t = 0; t < kTiles; ++t) lists[t].set_cycles(cycles[t]);
  for (int round = 0; round < 8 * kTiles; ++round) {
    const int up = round % kTiles, down = random() % kTiles;
    int rows[kExperts], first[kExperts], total = 0;
    for (int e = 0; e < kExperts; ++e) {
      rows[e] = random() % 3 ? random() % 700 : 0;
      first[e] = total;
      total += rows[e];
    }
    std::vector<TokenTile> tiles[2];
    TileLists made = {{-1, -1}, {-1, -1}, -1};
    TileOutput out = {&made, {}, {lists[up], lists[down]}};
    TileCounts counts = {};
    for (int s = 0; s < 2; ++s) {
      tiles[s].resize(kExperts + total / out.widths[s].max() + 1, {-1, -1, -1, -1});
      out.tiles[s] = tiles[s].data();
    }
    std::barrier barrier(kExperts);
    std::vector<std::thread> threads;
    for (int e = 0; e < kExperts; ++e)
      threads.emplace_back([&, e] {
        threadIdx.x = e;
        write_tiles<2>(out, rows[e], counts, [&] {
          barrier.arrive_and_wait();
          return first[e];
        });
      });
    for (auto& thread : threads) thread.join();
    for (int s = 0; s < 2; ++s) {
      std::printf("%d %d %d", s ? down : up, made.tiles[s], made.next[s]);
      for (int e = 0; e < kExperts; ++e) std::printf(" %d", rows[e]);
      for (const TokenTile& tile : tiles[s]) std::printf(" %d %d %d %d", tile.expert, tile.row, tile.count, tile.width);
      std::printf("\n");
    }
  }
}
"""


def test_lists_hold_every_row_once_from_wide_to_narrow(tmp_path):
    """csrc/moe/tile_lists.cuh, with threads of the host."""
    tiles, experts = TILES + OTHERS, 24
    source = LISTS.replace("{LISTS}", listed(f"{{{len(tile.widths)}, {listed(tile.widths)}}}" for tile in tiles))
    source = source.replace("CYCLES", ", ".join(listed(tile.cycles) for tile in tiles))
    (tmp_path / "cuda_runtime.h").write_text(CUDA)
    options = ("-pthread", f"-I{tmp_path}", "-Wno-unknown-pragmas", "-Wno-missing-field-initializers")
    lines = compiled(tmp_path, source, *options).splitlines()
    assert len(lines) == 2 * 8 * len(tiles)
    for line in lines:
        index, made, cursor, *numbers = map(int, line.split())
        tile, counts, flat = tiles[index], numbers[:experts], numbers[experts:]
        every = [tuple(flat[i : i + 4]) for i in range(0, len(flat), 4)]
        found, beyond = every[:made], every[made:]
        assert cursor == 0
        assert beyond
        assert set(beyond) == {(-1, -1, -1, -1)}
        widths = [width for _, _, _, width in found]
        assert widths == sorted(widths, reverse=True)
        first = 0
        for expert, rows in enumerate(counts):
            mine = sorted((row, count, width) for e, row, count, width in found if e == expert)
            assert tuple(width for _, _, width in mine) == tile.cut(rows)
            covered = [row for start, count, _ in mine for row in range(start, start + count)]
            assert covered == list(range(first, first + rows))
            assert all(0 < count <= width for _, count, width in mine)
            first += rows
