// SPDX-License-Identifier: Apache-2.0
// Routing: rows sorted by local expert (no padding) and the token tiles of both GEMMs, all on the device.
// The order of rows within an expert varies from run to run; every row is computed on its own, so no result depends on it.
#include "../ptx/ptx.cuh"
#include "launch.h"

namespace vllm_humming {
namespace {

constexpr int kThreads = 1024;  // also the most local experts: one thread an expert in the scan
constexpr int kSmallEntries = 4096;  // most entries of the one-CTA path
constexpr int kLargeEntries = kThreads;  // entries of a CTA of the other: one a thread

// Exclusive prefix sum over the block's threads.
__device__ int scan(int v, int& total) {
  __shared__ int warp_sum[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int inclusive = v;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int y = __shfl_up_sync(~0u, inclusive, d);
    if (lane >= d) inclusive += y;
  }
  if (lane == 31) warp_sum[warp] = inclusive;
  __syncthreads();
  if (warp == 0) {
    int x = warp_sum[lane];
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int y = __shfl_up_sync(~0u, x, d);
      if (lane >= d) x += y;
    }
    warp_sum[lane] = x;
  }
  __syncthreads();
  total = warp_sum[31];
  return inclusive - v + (warp ? warp_sum[warp - 1] : 0);
}

// Index of the narrowest width that holds `rows`; of the widest where none does.
__device__ __forceinline__ int width_index(const WidthList& list, int rows) {
  int i = 0;
  while (i + 1 < list.count && list.at[i] < rows) ++i;
  return i;
}

// Rows of thread's expert -> its first row; writes the token tiles: as many of the widest as it fills, then a narrow one for the rest. The
// list goes from wide to narrow: CTAs take tiles as they finish others, so the last ones should be short.
__device__ int write_tiles(const RouteParams& p, int expert, int rows) {
  __shared__ int cursor[2][WidthList::kMost];
  if (threadIdx.x < 2 * WidthList::kMost) (&cursor[0][0])[threadIdx.x] = 0;
  int total;
  const int row = scan(rows, total);                               // its barriers cover the cursors too
  int full[2], rest[2];
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    full[s] = rows / p.widths[s].max();
    rest[s] = rows % p.widths[s].max();
    if (full[s]) atomicAdd(&cursor[s][p.widths[s].count - 1], full[s]);
    if (rest[s]) atomicAdd(&cursor[s][width_index(p.widths[s], rest[s])], 1);
  }
  __syncthreads();
  if (threadIdx.x < 2) {
    const int s = threadIdx.x;
    int first = 0;
    for (int i = p.widths[s].count - 1; i >= 0; --i) {
      const int tiles = cursor[s][i];
      cursor[s][i] = first;
      first += tiles;
    }
    p.lists->tiles[s] = first;
    p.lists->next[s] = 0;
    if (s == 0) p.lists->rows = total;
  }
  __syncthreads();
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    const int widest = p.widths[s].max();
    if (full[s]) {
      const int at = atomicAdd(&cursor[s][p.widths[s].count - 1], full[s]);
      for (int i = 0; i < full[s]; ++i) p.tiles[s][at + i] = TokenTile{expert, row + i * widest, widest, widest};
    }
    if (rest[s]) {
      const int index = width_index(p.widths[s], rest[s]);
      p.tiles[s][atomicAdd(&cursor[s][index], 1)] = TokenTile{expert, row + full[s] * widest, rest[s], p.widths[s].at[index]};
    }
  }
  return row;
}

__device__ __forceinline__ int expert_of(const RouteParams& p, int entry) {
  return local_expert(p.topk_ids[entry], p.expert_map, p.global_experts, p.local_experts);
}

// All of it in one CTA: entries <= kSmallEntries. Rows are put in order in shared memory first: one SM's scattered global stores would
// take longer than everything else here.
__global__ void __launch_bounds__(kThreads) route_small(const __grid_constant__ RouteParams p) {
  constexpr int kEntries = kSmallEntries / kThreads;  // a thread
  __shared__ int cursor[kThreads], slots[kSmallEntries], total;
  __shared__ float weights[kSmallEntries];
  cursor[threadIdx.x] = 0;
  __syncthreads();
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  int expert[kEntries], rank[kEntries];
  float weight[kEntries];
#pragma unroll
  for (int i = 0; i < kEntries; ++i) {
    const int entry = threadIdx.x + i * kThreads;
    expert[i] = entry < p.entries ? expert_of(p, entry) : -1;
    weight[i] = entry < p.entries ? p.topk_weights[entry] : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < kEntries; ++i) rank[i] = expert[i] >= 0 ? atomicAdd(&cursor[expert[i]], 1) : 0;
  __syncthreads();
  const int rows = cursor[threadIdx.x], first = write_tiles(p, threadIdx.x, rows);
  cursor[threadIdx.x] = first;
  if (threadIdx.x == kThreads - 1) total = first + rows;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kEntries; ++i)
    if (expert[i] >= 0) {
      const int row = cursor[expert[i]] + rank[i];
      slots[row] = threadIdx.x + i * kThreads;
      weights[row] = weight[i];
    }
  __syncthreads();
  for (int row = threadIdx.x; row < total; row += kThreads) {
    p.slots[row] = slots[row];
    p.row_weight[row] = weights[row];
  }
}

// Large batches: count (the last CTA scans), then scatter. counts[] holds zeros and a zero ticket at the start.
__global__ void __launch_bounds__(kThreads) route_count(const __grid_constant__ RouteParams p) {
  __shared__ int histogram[kThreads];
  __shared__ bool last;
  histogram[threadIdx.x] = 0;
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
  const int first = write_tiles(p, e, rows);
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
  }
}

}  // namespace

int route_blocks(int64_t entries) { return int((entries + kLargeEntries - 1) / kLargeEntries); }

void launch_route(const RouteParams& p, cudaStream_t stream) {
  if (p.local_experts > kThreads) throw std::runtime_error("vllm_humming: more than 1024 local experts are not supported");
  if (p.entries <= kSmallEntries) {
    launch(route_small, 1, kThreads, 0, stream, p);
    return;
  }
  check(cudaMemsetAsync(p.counts, 0, sizeof(int) * (p.local_experts + 1), stream), "clear the routing counters");
  const int blocks = route_blocks(p.entries);
  launch(route_count, blocks, kThreads, 0, stream, p);
  launch(route_scatter, blocks, kThreads, 0, stream, p);
}

}  // namespace vllm_humming
