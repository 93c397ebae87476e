// SPDX-License-Identifier: Apache-2.0
// Layers of few entries may do without a routing kernel (routes_itself in layer.cpp): each CTA's scheduler warp sorts the ids, all the same way, so
// that they agree on the rows.
#pragma once
#include "entries.cuh"
#include "tile.cuh"

namespace vllm_humming::gemm {

// What a CTA's scheduler knows of the entries.
struct FewShared {
  uint32_t at;  // shared-memory address
  __device__ __forceinline__ explicit FewShared(const Shared& s) : at(s.few) {}
  // Keys: expert * kMostFewEntries + entry.
  __device__ __forceinline__ uint32_t by_entry(int entry) const { return at + entry * 4; }
  __device__ __forceinline__ uint32_t by_row(int row) const { return at + (kMostFewEntries + row) * 4; }
  __device__ __forceinline__ uint32_t first_row(int tile) const { return at + (2 * kMostFewEntries + tile) * 4; }  // tile = tiles: all rows
};

// Token tiles of few entries, with the interface of ListedTiles. Rows are sorted by expert, then entry.
template <typename C>
struct FewTiles {
  const FewShared few;
  int tiles;

  // By one warp, once nothing writes the ids any more.
  __device__ __forceinline__ FewTiles(const FewEntries& entries, const Shared& s, int lane) : few(s) {
    constexpr int kEntries = kMostFewEntries / 32;  // a lane
    int expert[kEntries];
    experts_of(entries, lane, 32, entries.entries, expert);
    uint32_t key[kEntries];
    int rows = 0;
#pragma unroll
    for (int i = 0; i < kEntries; ++i) {
      const int entry = lane + i * 32;
      key[i] = expert[i] >= 0 ? uint32_t(expert[i] * kMostFewEntries + entry) : ~0u;
      ptx::store_shared_4(few.by_entry(entry), key[i]);
      rows += __popc(__ballot_sync(~0u, expert[i] >= 0));
    }
    __syncwarp();
    // An entry's row: how many keys are less. No two are equal, but for those of no expert.
    int row[kEntries] = {};
#pragma unroll 1
    for (int e = 0; e < entries.entries; e += 4) {
      const uint4 other = ptx::load_shared_16(few.by_entry(e));
#pragma unroll
      for (int i = 0; i < kEntries; ++i) row[i] += (other.x < key[i]) + (other.y < key[i]) + (other.z < key[i]) + (other.w < key[i]);
    }
#pragma unroll
    for (int i = 0; i < kEntries; ++i)
      if (expert[i] >= 0) ptx::store_shared_4(few.by_row(row[i]), key[i]);
    __syncwarp();
    // A tile starts where an expert's rows do, and every kMaxWidth rows from there.
    const uint32_t before = (1u << lane) - 1;
    int group = 0;  // first row of the expert that the last row seen belongs to
    tiles = 0;
#pragma unroll 1
    for (int first = 0; first < rows; first += 32) {
      const int r = first + lane;
      const bool inside = r < rows;
      const int mine = inside ? expert_at(r) : -1, previous = inside && r > 0 ? expert_at(r - 1) : -1;
      const uint32_t groups = __ballot_sync(~0u, mine != previous);
      const uint32_t upto = groups & (before << 1 | 1);
      const bool starts = inside && (r - (upto ? first + 31 - __clz(upto) : group)) % C::kMaxWidth == 0;
      const uint32_t all = __ballot_sync(~0u, starts);
      if (starts) ptx::store_shared_4(few.first_row(tiles + __popc(all & before)), r);
      tiles += __popc(all);
      if (groups) group = first + 31 - __clz(groups);
    }
    if (lane == 0) ptx::store_shared_4(few.first_row(tiles), rows);
    __syncwarp();
  }

  __device__ __forceinline__ int total() const { return tiles; }
  __device__ __forceinline__ TokenTile at(int index) const {
    const int row = ptx::load_shared_4(few.first_row(index)), count = ptx::load_shared_4(few.first_row(index + 1)) - row;
    return {expert_at(row), row, count, narrowest_width<C>(count)};
  }
  __device__ __forceinline__ int slot(int row) const { return ptx::load_shared_4(few.by_row(row)) % kMostFewEntries; }
  __device__ __forceinline__ int weight(int row) const { return slot(row); }

 private:
  __device__ __forceinline__ int expert_at(int row) const { return ptx::load_shared_4(few.by_row(row)) / kMostFewEntries; }
};

// The same where each GEMM has a kernel of its own.
template <typename C>
struct FewTilesApart : FewTiles<C> {
  const GemmParams& p;
  __device__ __forceinline__ FewTilesApart(const GemmParams& params, const Shared& s, int lane) : FewTiles<C>(params.few, s, lane), p(params) {}
  // The up GEMM's are dealt: nothing could have zeroed a cursor for it. The down GEMM's is zeroed by the up GEMM.
  __device__ __forceinline__ int after(int t, int lane) const {
    if (!p.next_tile) return t + gridDim.x;
    ptx::grid_dependency_wait();
    if (lane == 0) t = gridDim.x + atomicAdd(p.next_tile, 1);
    return __shfl_sync(~0u, t, 0);
  }
};

// The up GEMM's scheduler, before it looks at the ids; the down GEMM's need not wait for them, since the up GEMM has waited before it let the down
// GEMM start. The down GEMM's cursor is zeroed in every layer: before, the workspace may hold anything. What used it last, if anything, came before
// this kernel and has ended when the wait returns. The down GEMM touches it only behind its own wait, for all of this kernel.
__device__ __forceinline__ void prepare_few(const GemmParams& p, int lane) {
  ptx::grid_dependency_wait();
  if (blockIdx.x == 0 && lane == 0) *p.few.next_down = 0;
}

}  // namespace vllm_humming::gemm
