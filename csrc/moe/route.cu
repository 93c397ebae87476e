// SPDX-License-Identifier: Apache-2.0
// Routing: rows sorted by local expert (no padding) and the token tiles of both GEMMs, all on the device.
// The order of rows within an expert varies from run to run; every row is computed on its own, so no result depends on it.
#include "../ptx/ptx.cuh"
#include "entries.cuh"
#include "launch.h"
#include "tile_lists.cuh"

namespace vllm_humming {
namespace {

constexpr int kThreads = kMostExperts;  // one thread an expert in the scan
constexpr int kSmallEntries = 4096;  // most entries of the one-CTA path
constexpr int kLargeEntries = kThreads;  // entries of a CTA of the other: one a thread

// Rows of thread's expert -> its first row; writes the tile lists and the number of rows. One barrier.
__device__ __forceinline__ int list_tiles(const RouteParams& p, int rows, TileCounts& counts, int& total) {
  __shared__ int warp_sum[kThreads / 32];
  const int row = write_tiles<2>(p, rows, counts, [&] { return block_scan<kThreads / 32>(rows, warp_sum, total); });
  if (threadIdx.x == 0) p.lists->rows = total;
  return row;
}

// All of it in one CTA: entries <= kSmallEntries, or without Rows the tile lists alone, for any number. Rows are put in order in shared memory
// first: one SM's scattered global stores would take longer than everything else here.
template <bool Rows>
__global__ void __launch_bounds__(kThreads) route_small(const __grid_constant__ RouteParams p) {
  constexpr int kEntries = kSmallEntries / kThreads;  // a thread, at a time
  __shared__ int cursor[kThreads];
  __shared__ TileCounts counts;
  __shared__ int slots[Rows ? kSmallEntries : 1];
  __shared__ float weights[Rows ? kSmallEntries : 1];
  const int thread = threadIdx.x;
  cursor[thread] = 0;
  if (thread == 0) counts = {};
  __syncthreads();
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  if (p.ready)
    for (int i = thread; i < p.most_tiles; i += kThreads) p.ready[i] = 0;
  int expert[kEntries], rank[kEntries];
  float weight[kEntries];
  for (int first = 0; first < p.entries; first += kSmallEntries) {
    if constexpr (Rows) {
#pragma unroll
      for (int i = 0; i < kEntries; ++i) weight[i] = __ldcg(p.topk_weights + min(thread + i * kThreads, p.entries - 1));
    }
    experts_of(p, first + thread, kThreads, p.entries, expert);
#pragma unroll
    for (int i = 0; i < kEntries; ++i) {
      if constexpr (Rows) rank[i] = expert[i] >= 0 ? atomicAdd(&cursor[expert[i]], 1) : 0;
      else if (expert[i] >= 0) atomicAdd(&cursor[expert[i]], 1);
    }
  }
  __syncthreads();
  int total;
  const int row = list_tiles(p, cursor[thread], counts, total);
  if constexpr (Rows) {
    cursor[thread] = row;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kEntries; ++i)
      if (expert[i] >= 0) {
        const int r = cursor[expert[i]] + rank[i];
        slots[r] = thread + i * kThreads;
        weights[r] = weight[i];
        if (p.row_of_slot) p.row_of_slot[thread + i * kThreads] = r;
      } else if (p.row_of_slot && thread + i * kThreads < p.entries) {
        p.row_of_slot[thread + i * kThreads] = -1;
      }
    __syncthreads();
    for (int r = thread; r < total; r += kThreads) {
      p.slots[r] = slots[r];
      p.row_weight[r] = weights[r];
    }
  }
}

// Large batches: count (the last CTA scans), then scatter. counts[] holds zeros and a zero ticket at the start.
__global__ void __launch_bounds__(kThreads) route_count(const __grid_constant__ RouteParams p) {
  __shared__ int histogram[kThreads];
  __shared__ bool last;
  __shared__ TileCounts counts;
  histogram[threadIdx.x] = 0;
  if (threadIdx.x == 0) counts = {};
  __syncthreads();
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  const int entry = blockIdx.x * kLargeEntries + threadIdx.x;
  const int mine = entry < p.entries ? expert_of(p, entry) : -1;
  if (mine >= 0) atomicAdd(&histogram[mine], 1);
  __syncthreads();
  const int e = threadIdx.x;
  if (e < p.local_experts)
    p.block_base[size_t(blockIdx.x) * p.local_experts + e] = histogram[e] ? atomicAdd(&p.counts[e], histogram[e]) : 0;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(&p.counts[p.local_experts], 1) == int(gridDim.x) - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  const int rows = e < p.local_experts ? __ldcg(&p.counts[e]) : 0;
  int total;
  const int first = list_tiles(p, rows, counts, total);
  if (e < p.local_experts) p.counts[e] = first;  // the scatter kernel reads offsets here
}

__global__ void __launch_bounds__(kThreads) route_scatter(const __grid_constant__ RouteParams p) {
  __shared__ int cursor[kThreads];
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  const int e = threadIdx.x;
  if (e < p.local_experts) cursor[e] = p.counts[e] + p.block_base[size_t(blockIdx.x) * p.local_experts + e];
  __syncthreads();
  const int entry = blockIdx.x * kLargeEntries + threadIdx.x;
  const int expert = entry < p.entries ? expert_of(p, entry) : -1;
  if (expert >= 0) {
    const int row = atomicAdd(&cursor[expert], 1);
    p.slots[row] = entry;
    p.row_weight[row] = p.topk_weights[entry];
    if (p.row_of_slot) p.row_of_slot[entry] = row;
  } else if (p.row_of_slot && entry < p.entries) {
    p.row_of_slot[entry] = -1;
  }
}

}  // namespace

int route_blocks(int64_t entries) { return int((entries + kLargeEntries - 1) / kLargeEntries); }

void launch_route(const RouteParams& p, cudaStream_t stream) {
  if (p.entries <= kSmallEntries) {
    launch(route_small<true>, 1, kThreads, 0, stream, p);
    return;
  }
  check(cudaMemsetAsync(p.counts, 0, sizeof(int) * (p.local_experts + 1), stream), "clear the routing counters");
  const int blocks = route_blocks(p.entries);
  launch(route_count, blocks, kThreads, 0, stream, p);
  launch(route_scatter, blocks, kThreads, 0, stream, p);
}

void launch_tile_lists(const RouteParams& p, cudaStream_t stream) {
  launch(route_small<false>, 1, kThreads, 0, stream, p);
}

}  // namespace vllm_humming
