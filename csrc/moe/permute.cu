// SPDX-License-Identifier: Apache-2.0
// sorted[row] = x[slots[row] / top_k] for the rows that have a local expert.
#include <algorithm>
#include "../ptx/ptx.cuh"
#include "launch.h"

namespace vllm_humming {
namespace {

constexpr int kThreads = 256;
constexpr int kBatch = 4;  // rows in flight a thread

__global__ void __launch_bounds__(kThreads) permute(const uint4* x, uint4* sorted, const int* slots, const int* rows_end, int entries, int top_k,
                                                    int vectors) {
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  const int rows = min(*rows_end, entries);
  const int first = blockIdx.x * kBatch;
  if (first >= rows) return;
  int64_t source[kBatch];
#pragma unroll
  for (int i = 0; i < kBatch; ++i) source[i] = int64_t(slots[min(first + i, rows - 1)] / top_k) * vectors;
  for (int v = threadIdx.x; v < vectors; v += kThreads) {
    uint4 value[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) value[i] = __ldg(x + source[i] + v);
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (first + i < rows) sorted[int64_t(first + i) * vectors + v] = value[i];
  }
}

}  // namespace

void launch_permute(const void* x, void* sorted, const RouteParams& p, int64_t columns, cudaStream_t stream) {
  launch(permute, (p.entries + kBatch - 1) / kBatch, kThreads, 0, stream, static_cast<const uint4*>(x), static_cast<uint4*>(sorted),
         static_cast<const int*>(p.slots), static_cast<const int*>(&p.lists->rows), p.entries, p.top_k, int(columns / 8));
}

}  // namespace vllm_humming
