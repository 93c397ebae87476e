// SPDX-License-Identifier: Apache-2.0
// What routing, sorting copy and reduction share on the device: an entry's expert, a block-wide prefix sum.
#pragma once
#include "params.h"

namespace vllm_humming {

// Local experts of entries first, first + step, .. below `end`; negative where there is none. P: RouteParams, ReduceParams or FewEntries. All ids
// are loaded before the first is looked at: behind branches the loads waited for each other. Read past L1, which may hold what these addresses were
// before: kernels read ids without waiting for the kernel ahead where that one has waited.
template <int N, typename P>
__device__ __forceinline__ void experts_of(const P& p, int first, int step, int end, int (&expert)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) expert[i] = __ldcg(p.topk_ids + max(0, min(first + i * step, end - 1)));
#pragma unroll
  for (int i = 0; i < N; ++i) expert[i] = first + i * step < end && expert[i] < p.global_experts ? expert[i] : -1;
  if (p.expert_map) {
    int local[N];
#pragma unroll
    for (int i = 0; i < N; ++i) local[i] = __ldcg(p.expert_map + max(0, expert[i]));
#pragma unroll
    for (int i = 0; i < N; ++i) expert[i] = expert[i] < 0 ? -1 : local[i];
  }
#pragma unroll
  for (int i = 0; i < N; ++i) expert[i] = expert[i] < p.local_experts ? expert[i] : -1;
}

// Local expert of an id, or negative.
template <typename P>
__device__ __forceinline__ int expert_of_id(const P& p, int id) {
  const int local = id >= 0 && id < p.global_experts && p.expert_map ? __ldcg(p.expert_map + id) : id;
  return id < p.global_experts && local < p.local_experts ? local : -1;
}

template <typename P>
__device__ __forceinline__ int expert_of(const P& p, int entry) {
  return expert_of_id(p, __ldcg(p.topk_ids + entry));
}

// Inclusive prefix sum over a warp.
__device__ __forceinline__ int warp_scan(int v, int lane) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int y = __shfl_up_sync(~0u, v, d);
    if (lane >= d) v += y;
  }
  return v;
}

// Exclusive prefix sum over the block's Warps warps, all of which call; one barrier. warp_sum: shared, [Warps].
template <int Warps>
__device__ __forceinline__ int block_scan(int v, int* warp_sum, int& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int inclusive = warp_scan(v, lane);
  if (lane == 31) warp_sum[warp] = inclusive;
  __syncthreads();
  const int sums = warp_scan(lane < Warps ? warp_sum[lane] : 0, lane);  // every warp for itself
  total = __shfl_sync(~0u, sums, 31);
  const int before = __shfl_sync(~0u, sums, (warp + 31) % 32);
  return inclusive - v + (warp ? before : 0);
}

}  // namespace vllm_humming
