// SPDX-License-Identifier: Apache-2.0
// Token tiles of sorted rows: what the routing and the caller's groups share on the device. One thread an expert.
#pragma once
#include "params.h"

namespace vllm_humming {

// Index of the narrowest width that holds `rows`; of the widest where none does.
__device__ __forceinline__ int width_index(const WidthList& list, int rows) {
  int i = 0;
  while (i + 1 < list.count && list.at[i] < rows) ++i;
  return i;
}

// Tiles of each width, and those that threads have taken of them, for both GEMMs.
struct TileCounts {
  int made[2][WidthList::kMost], taken[2][WidthList::kMost];
};

// Writes the token tiles of thread's expert, which has `rows` rows: as many of the widest as it fills, then a narrow one for the rest. The
// list goes from wide to narrow: CTAs take tiles as they finish others, so the last ones should be short. `counts`: shared, zero.
// base(): the expert's first row, which is returned; it has a barrier of the block. All threads call; Gemms: lists to write.
template <int Gemms, typename Base>
__device__ __forceinline__ int write_tiles(const TileOutput& p, int rows, TileCounts& counts, Base base) {
  const int expert = threadIdx.x;
  int full[Gemms], rest[Gemms], index[Gemms];
#pragma unroll
  for (int s = 0; s < Gemms; ++s) {
    const WidthList& list = p.widths[s];
    full[s] = rows / list.max();
    rest[s] = rows - full[s] * list.max();
    index[s] = width_index(list, rest[s]);
    if (full[s]) atomicAdd(&counts.made[s][list.count - 1], full[s]);
    if (rest[s]) atomicAdd(&counts.made[s][index[s]], 1);
  }
  const int row = base();
#pragma unroll
  for (int s = 0; s < Gemms; ++s) {
    const int widest = p.widths[s].max(), last = p.widths[s].count - 1;
    int sum = 0, wider = 0;                                          // tiles in all, and those wider than this expert's narrow one
#pragma unroll
    for (int i = 0; i < WidthList::kMost; ++i) {
      const int made = counts.made[s][i];                            // zero past the list's widths
      sum += made;
      if (i > index[s]) wider += made;
    }
    if (expert == 0) {
      p.lists->tiles[s] = sum;
      p.lists->next[s] = 0;
    }
    if (full[s]) {
      const int at = atomicAdd(&counts.taken[s][last], full[s]);     // the widest come first
      for (int i = 0; i < full[s]; ++i) p.tiles[s][at + i] = TokenTile{expert, row + i * widest, widest, widest};
    }
    if (rest[s]) {
      const int at = wider + atomicAdd(&counts.taken[s][index[s]], 1);
      p.tiles[s][at] = TokenTile{expert, row + full[s] * widest, rest[s], p.widths[s].at[index[s]]};
    }
  }
  return row;
}

}  // namespace vllm_humming
