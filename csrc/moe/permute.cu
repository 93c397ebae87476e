// SPDX-License-Identifier: Apache-2.0
// The sorted copy of the tokens: sorted[row] = x[slots[row] / top_k] for the rows that have a local expert, or a group.
#include <algorithm>
#include "../ptx/ptx.cuh"
#include "entries.cuh"
#include "launch.h"

namespace vllm_humming {
namespace {

constexpr int kThreads = 256;
constexpr int kBatch = 4;  // rows in flight a thread

// From: whether the list has a first row.
template <bool From>
__global__ void __launch_bounds__(kThreads) permute(const uint4* x, uint4* sorted, const __grid_constant__ RowList list, int vectors) {
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  const int begin = From ? __ldcg(list.begin) : 0, rows = min(__ldcg(list.end), list.rows);
  const int first = blockIdx.x * kBatch;
  if (first >= rows || (From && max(first, begin) >= min(first + kBatch, rows))) return;
  int64_t source[kBatch];
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    const int row = min(first + i, rows - 1);
    source[i] = int64_t(__ldcg(list.slots + (From ? max(row, begin) : row)) / list.top_k) * vectors;
  }
  for (int v = threadIdx.x; v < vectors; v += kThreads) {
    uint4 value[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) value[i] = __ldg(x + source[i] + v);
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (first + i < rows && (!From || first + i >= begin)) sorted[int64_t(first + i) * vectors + v] = value[i];
  }
}

constexpr int kSortEntries = 16384;         // most entries: every CTA counts them all
constexpr int kSortThreads = 512, kSortWarps = kSortThreads / 32;
constexpr int kSortCtas = 2;                // an SM
constexpr int kIds = 8;                     // ids in flight a thread
constexpr int kBufferBytes = 64 * 1024;     // of token rows, a CTA
constexpr int kCopyWarps = kSortWarps - 1;  // at most: the last warp waits for the kernel ahead

// Rows and sorted copy at once: each CTA counts every expert's entries (all entries: a few thousand ids from L2), so it knows the rows of its own
// tokens' entries without any other CTA. It writes their slots and router weights and copies each token from shared memory to its rows.
// Meanwhile the kernel ahead, one CTA, makes the tile lists. Nothing here needs them: ids, weights and x are older than that kernel, which has
// waited, and what is written here is read by later kernels. One warp waits for it all the same, so that the up GEMM may start on the lists.
__global__ void __launch_bounds__(kSortThreads) sort_tokens(const __grid_constant__ RouteParams p, const uint8_t* x, uint8_t* sorted, int row_bytes,
                                                            int buffers) {
  extern __shared__ __align__(128) uint8_t rows[];
  __shared__ int before[kMostExperts], after[kMostExperts], warp_sum[kSortWarps];  // entries of an expert before this CTA's, and the rest
  __shared__ uint64_t full[kCopyWarps];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int tokens = p.entries / p.top_k;
  const int first = int(int64_t(tokens) * blockIdx.x / gridDim.x), end = int(int64_t(tokens) * (blockIdx.x + 1) / gridDim.x);
  const uint32_t buffer = ptx::smem_address(rows) + warp * row_bytes, bar = ptx::smem_address(full + min(warp, kCopyWarps - 1));
  auto load = [&](int token) {
    ptx::mbarrier_arrive_expect_tx(bar, row_bytes);
    ptx::bulk_load(buffer, x + int64_t(token) * row_bytes, row_bytes, bar);
  };
  if (warp < buffers && lane == 0) {
    ptx::mbarrier_init(bar, 1);
    ptx::mbarrier_init_fence();
    if (first + warp < end) load(first + warp);
  }
  auto id_at = [&](int token, int k) { return token < end && k < p.top_k ? __ldcg(p.topk_ids + token * p.top_k + k) : -1; };
  int next = warp < buffers ? id_at(first + warp, lane) : -1;
  for (int e = thread; e < kMostExperts; e += kSortThreads) before[e] = after[e] = 0;
  __syncthreads();
  for (int at = thread; at < p.entries; at += kSortThreads * kIds) {
    int expert[kIds];
    experts_of(p, at, kSortThreads, p.entries, expert);
#pragma unroll
    for (int i = 0; i < kIds; ++i)
      if (expert[i] >= 0) atomicAdd((at + i * kSortThreads < first * p.top_k ? before : after) + expert[i], 1);
  }
  __syncthreads();
  static_assert(kMostExperts == 2 * kSortThreads);
  const int2 mine = reinterpret_cast<int2*>(before)[thread], rest = reinterpret_cast<int2*>(after)[thread];
  int total;
  const int row = block_scan<kSortWarps>(mine.x + rest.x + mine.y + rest.y, warp_sum, total);
  reinterpret_cast<int2*>(before)[thread] = make_int2(row + mine.x, row + mine.x + rest.x + mine.y);  // the CTA's next row of an expert
  __syncthreads();
  if (warp == kSortWarps - 1) {
    ptx::grid_dependency_wait();
    ptx::grid_dependency_launch();
  }
  if (warp >= buffers) return;
  uint32_t parity = 0;
  for (int token = first + warp; token < end; token += buffers, parity ^= 1) {
    ptx::mbarrier_wait(bar, parity);
#pragma unroll 1
    for (int k = lane; k < p.top_k; k += 32) {
      const int entry = token * p.top_k + k, expert = expert_of_id(p, k == lane ? next : id_at(token, k));
      if (expert < 0) continue;
      const int r = atomicAdd(&before[expert], 1);
      ptx::bulk_store(sorted + int64_t(r) * row_bytes, buffer, row_bytes);
      p.slots[r] = entry;
      p.row_weight[r] = __ldcg(p.topk_weights + entry);
    }
    ptx::bulk_commit();
    next = id_at(token + buffers, lane);
    ptx::bulk_wait_read<0>();
    __syncwarp();
    if (lane == 0 && token + buffers < end) load(token + buffers);
  }
  ptx::bulk_wait<0>();
}

}  // namespace

bool sorting_makes_rows(int64_t entries, int64_t columns) { return entries <= kSortEntries && columns * 2 <= kBufferBytes; }

void launch_sort(const void* x, void* sorted, const RouteParams& p, int64_t columns, cudaStream_t stream) {
  const int row_bytes = int(columns * 2), tokens = p.entries / p.top_k;
  check(cudaFuncSetAttribute(sort_tokens, cudaFuncAttributeMaxDynamicSharedMemorySize, kBufferBytes), "reserve shared memory");
  const int grid = std::min(tokens, multiprocessors() * kSortCtas);
  const int buffers = std::min({kCopyWarps, kBufferBytes / row_bytes, (tokens + grid - 1) / grid});
  launch(sort_tokens, grid, kSortThreads, buffers * row_bytes, stream, p, static_cast<const uint8_t*>(x), static_cast<uint8_t*>(sorted), row_bytes,
         buffers);
}

void launch_permute(const void* x, void* sorted, const RowList& list, int64_t columns, cudaStream_t stream) {
  launch(list.begin ? permute<true> : permute<false>, (list.rows + kBatch - 1) / kBatch, kThreads, 0, stream, static_cast<const uint4*>(x),
         static_cast<uint4*>(sorted), list, int(columns / 8));
}

}  // namespace vllm_humming
