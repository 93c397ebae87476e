// SPDX-License-Identifier: Apache-2.0
// Token tiles of sorted rows: what the routing and the caller's groups share on the device. One thread an expert.
#pragma once
#include "params.h"

namespace vllm_humming {

// Tiles of each width, and those that threads have taken of them, for both GEMMs.
struct TileCounts {
  int made[2][WidthList::kMost], taken[2][WidthList::kMost];
};

// Writes the token tiles of thread's expert, which has `rows` rows, as the tile's widths are cut (cut.h). The list goes from wide to narrow:
// CTAs take tiles as they finish others, so the last ones should be short. `counts`: shared, zero.
// base(): the expert's first row, which is returned; it has a barrier of the block. All threads call; Gemms: lists to write.
template <int Gemms, typename Base>
__device__ __forceinline__ int write_tiles(const TileOutput& p, int rows, TileCounts& counts, Base base) {
  const int expert = threadIdx.x;
  Cut cut[Gemms];
#pragma unroll
  for (int s = 0; s < Gemms; ++s) {
    cut[s] = p.widths[s].cut(rows);
#pragma unroll
    for (int i = 0; i < WidthList::kMost; ++i) {
      const int tiles = cut[s].of(i, p.widths[s].count - 1);
      if (tiles) atomicAdd(&counts.made[s][i], tiles);
    }
  }
  const int first = base();
#pragma unroll
  for (int s = 0; s < Gemms; ++s) {
    int row = first, wider = 0;  // the expert's next; tiles of the widths before
#pragma unroll
    for (int i = WidthList::kMost - 1; i >= 0; --i) {
      const int tiles = cut[s].of(i, p.widths[s].count - 1);
      if (tiles) {
        const int at = wider + atomicAdd(&counts.taken[s][i], tiles), width = p.widths[s].at[i];
#pragma unroll 1  // code size: it runs once, from a cold instruction cache
        for (int t = 0; t < tiles; ++t, row += width) p.tiles[s][at + t] = TokenTile{expert, row, min(width, first + rows - row), width};
      }
      wider += counts.made[s][i];  // zero past the list's widths
    }
    if (expert == 0) {
      p.lists->tiles[s] = wider;
      p.lists->next[s] = 0;
    }
  }
  return first;
}

}  // namespace vllm_humming
