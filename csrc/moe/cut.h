// SPDX-License-Identifier: Apache-2.0
// How an expert's rows are cut into token tiles. Host code too: tests/test_cut.py compiles it and compares it with schedule.py.
#pragma once
#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include "../inline.h"

namespace vllm_humming {

// Token tiles of one expert: of the widest width, and of the narrower ones in kBits each, the narrowest lowest.
struct Cut {
  static constexpr int kBits = 5;
  int widest;
  uint32_t narrow;
  // Tiles of width `i` of a list whose widest is its width `last`.
  VLLM_HUMMING_INLINE int of(int i, int last) const { return i == last ? widest : int(narrow >> i * kBits & ((1 << kBits) - 1)); }
};

// Token widths a tile is compiled for, ascending multiples of 8, and the cheapest cut of any number of rows.
//
// Rows are cut into no more tiles than it takes of the widest, which bounds the lists in the workspace, and of all such cuts the one whose
// costs sum to the least is taken. Narrower tiles are paid for with what the last of the widest would leave unused, less than one width. So only
// few tiles are not the widest, and which ones depends on nothing but the unused rows and, where there are few, the number of tiles.
struct WidthList {
  static constexpr int kMost = 4, kMostCuts = 160;
  int count, at[kMost];
  int most_narrow;             // most tiles of a cut that are not the widest; at least 1
  uint16_t narrow[kMostCuts];  // Cut::narrow by [min(tiles, most_narrow) - 1][unused / 8]

  VLLM_HUMMING_INLINE int max() const { return at[count - 1]; }
  VLLM_HUMMING_INLINE Cut cut(int rows) const {
    const int widest = max(), tiles = (rows + widest - 1) / widest, unused = tiles * widest - rows;
    const int few = tiles < 1 ? 1 : tiles < most_narrow ? tiles : most_narrow;  // no rows: nothing unused, so nothing narrow
    Cut c = {tiles, narrow[(few - 1) * (widest / 8) + unused / 8]};
    for (int i = 0; i + 1 < kMost; ++i) c.widest -= c.of(i, kMost - 1);
    return c;
  }

  // Fills the table of cuts for what a tile of each width costs: cycles of a chunk, and its epilogue as of a K of 2048 (schedule.py:
  // Tile.costs), in half cycles. Any K that occurs gives the same cuts, as far as tests tell.
  void set_cycles(const int* cycles) {
    const int widest = max(), steps = widest / 8;
    most_narrow = count > 1 ? (widest - 8) / (widest - at[count - 2]) : 1;
    if (most_narrow * steps > kMostCuts || most_narrow >= 1 << Cut::kBits)
      throw std::logic_error("vllm_humming: no room for the cuts of a tile: raise WidthList::kMostCuts or Cut::kBits");
    // Cheapest cuts by tiles and unused / 8: the cost above, Cut::narrow below, so that the least of both is defined whatever the order.
    uint64_t best[kMostCuts] = {};
    for (int tiles = 1; tiles <= most_narrow; ++tiles)
      for (int unused = 0; unused < steps; ++unused) {
        uint64_t& least = best[(tiles - 1) * steps + unused];
        least = ~uint64_t(0);
        for (int i = 0; i < count; ++i) {
          const int spent = (widest - at[i]) / 8;
          if (spent > unused) continue;
          const uint64_t tile = uint64_t(2 * cycles[i] + at[i]) << 16 | (i + 1 < count ? 1 << i * Cut::kBits : 0);
          least = std::min(least, tile + (tiles > 1 ? best[(tiles - 2) * steps + unused - spent] : 0));
        }
        narrow[(tiles - 1) * steps + unused] = uint16_t(least);
      }
  }
};
static_assert((WidthList::kMost - 1) * Cut::kBits <= 16);

struct CutTile {
  int row, width;
};

// Tile `index` of a cut, from wide to narrow. W: Widths.
template <typename W, int I = W::kCount - 1>
VLLM_HUMMING_INLINE CutTile cut_tile(const Cut& cut, int index, int row = 0) {
  constexpr int kWidth = W::kAt[I];
  if constexpr (I > 0) {
    const int tiles = cut.of(I, W::kCount - 1);
    if (index >= tiles) return cut_tile<W, I - 1>(cut, index - tiles, row + tiles * kWidth);
  }
  return {row + index * kWidth, kWidth};
}

}  // namespace vllm_humming
