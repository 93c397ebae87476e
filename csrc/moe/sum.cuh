// SPDX-License-Identifier: Apache-2.0
// Warpgroups that share weight rows and split K add up their accumulators. One of them, in turns, takes the others' through shared memory and ends
// the tile; these go on with the next. Parts are added in the same order whoever does it, so results do not depend on whose turn it is.
#pragma once
#include "tile.cuh"

namespace vllm_humming::gemm {

struct Sums {
  static constexpr int kArrivals = kEveryThreadArrives ? 128 : 4;  // of a warpgroup
  int turn = 0;  // tiles of this row group so far

  // Whether this warpgroup is the one; then acc holds the sum. width: the tile's.
  template <typename C>
  __device__ __forceinline__ bool add(const Shared& s, int warpgroup, int width, float (&acc)[C::kBlocks][C::kMaxWidth / 2]) {
    if constexpr (C::kSplitK == 1) return true;
    constexpr int kVectors = C::kBlocks * C::kMaxWidth / 8;        // of four accumulators a thread
    const int row_group = warpgroup / C::kSplitK, part = warpgroup % C::kSplitK, taker = turn % C::kSplitK;
    // Two barriers for the sums: with one, a warp that takes them could pass for the turn before, whose sums may still be on their way from warps of
    // its own warpgroup that are behind. They are not two turns behind: it has waited for `empty` since.
    const uint32_t full = s.sum_full + (row_group * 2 + turn % 2) * 8, empty = s.sum_empty + row_group * 8;
    const uint32_t turn_of_barrier = turn / 2 % 2, empty_before = turn % 2 ^ 1;
    // [the other parts][vector][thread]
    const uint32_t sums = s.sums + row_group * C::kSumBytes + threadIdx.x % 128 * 16;
    // The taker's own place, where that is one, holds another part: read, but not used.
    auto at = [&](int other, int vector) { return sums + (min(other - (other > taker), C::kSplitK - 2) * kVectors + vector) * (128 * 16); };
    auto used = [&](int vector) { return vector * 8 % C::kMaxWidth < width; };
    ++turn;
    if (ptx::uniform(part != taker)) {
      ptx::mbarrier_wait(empty, empty_before);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const float* a = acc[v * 8 / C::kMaxWidth] + v * 8 % C::kMaxWidth / 2;
        const uint4 sum = make_uint4(__float_as_uint(a[0]), __float_as_uint(a[1]), __float_as_uint(a[2]), __float_as_uint(a[3]));
        if (used(v)) ptx::store_shared_16(at(part, v), sum);
      }
      __syncwarp();
      if (kEveryThreadArrives || threadIdx.x % 32 == 0) ptx::mbarrier_arrive(full);
      return false;
    }
    ptx::mbarrier_wait(full, turn_of_barrier);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!used(v)) continue;
      float* a = acc[v * 8 / C::kMaxWidth] + v * 8 % C::kMaxWidth / 2;
      float sum[4];
#pragma unroll
      for (int i = 0; i < C::kSplitK; ++i) {
        const uint4 other = ptx::load_shared_16(at(i, v));
        const float values[4] = {__uint_as_float(other.x), __uint_as_float(other.y), __uint_as_float(other.z), __uint_as_float(other.w)};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float value = i == taker ? a[j] : values[j];
          sum[j] = i == 0 ? value : sum[j] + value;
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) a[j] = sum[j];
    }
    return true;
  }

  // By the one that took the sums, when it has used them: its reads are done.
  template <typename C>
  __device__ __forceinline__ void release(const Shared& s, int warpgroup) {
    if constexpr (C::kSplitK > 1) {
      __syncwarp();
      if (kEveryThreadArrives || threadIdx.x % 32 == 0) ptx::mbarrier_arrive(s.sum_empty + warpgroup / C::kSplitK * 8);
    }
  }
};

}  // namespace vllm_humming::gemm
