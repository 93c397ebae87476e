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

// Exclusive prefix sums of three counts over the block's threads; totals in `total`.
__device__ void scan3(int (&v)[3], int (&total)[3]) {
  __shared__ int warp_sum[3][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int inclusive[3];
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    int x = v[i];
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int y = __shfl_up_sync(~0u, x, d);
      if (lane >= d) x += y;
    }
    inclusive[i] = x;
    if (lane == 31) warp_sum[i][warp] = x;
  }
  __syncthreads();
  if (warp < 3) {
    int x = warp_sum[warp][lane];
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int y = __shfl_up_sync(~0u, x, d);
      if (lane >= d) x += y;
    }
    warp_sum[warp][lane] = x;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    v[i] = inclusive[i] - v[i] + (warp ? warp_sum[i][warp - 1] : 0);
    total[i] = warp_sum[i][31];
  }
}

// Narrowest width that holds `rows`; the widest where none does.
__device__ __forceinline__ int width_for(const WidthList& list, int rows) {
  int width = list.at[0];
  for (int i = 1; i < list.count && width < rows; ++i) width = list.at[i];
  return width;
}

// Rows of thread's expert -> its first row; writes the token tiles: as many of the widest as it fills, then a narrow one for the rest.
__device__ int write_tiles(const RouteParams& p, int expert, int rows) {
  int v[3] = {rows, 0, 0}, total[3];
#pragma unroll
  for (int s = 0; s < 2; ++s) v[1 + s] = (rows + p.widths[s].max() - 1) / p.widths[s].max();
  scan3(v, total);
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    const int widest = p.widths[s].max();
    for (int first = 0, i = 0; first < rows; first += widest, ++i) {
      const int count = min(widest, rows - first);
      p.tiles[s][v[1 + s] + i] = TokenTile{expert, v[0] + first, count, width_for(p.widths[s], count)};
    }
    if (threadIdx.x == 0) p.tile_counts[s] = total[1 + s];
  }
  if (threadIdx.x == 0) p.tile_counts[2] = total[0];
  return v[0];
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
