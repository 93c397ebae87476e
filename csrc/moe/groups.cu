// SPDX-License-Identifier: Apache-2.0
// Tile lists of rows that the caller has put in groups, by expert: offsets, or counts of equally spaced groups.
#include "../ptx/ptx.cuh"
#include "entries.cuh"
#include "launch.h"
#include "tile_lists.cuh"

namespace vllm_humming {
namespace {

constexpr int kThreads = kMostExperts;  // one thread an expert

// One CTA. What lies outside 0 .. rows, or beyond a group's rows_each, makes no tiles. Offsets must ascend: groups that overlap could make
// more tiles than the list holds.
template <int Gemms>
__global__ void __launch_bounds__(kThreads) group_tiles(const __grid_constant__ GroupParams p) {
  __shared__ TileCounts counts;
  if (threadIdx.x == 0) counts = {};
  __syncthreads();
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  const int expert = threadIdx.x;
  int first = 0, rows = 0;
  if (expert < p.experts) {
    if (p.rows_each > 0) {
      first = expert * p.rows_each;
      rows = min(max(__ldcg(p.groups + expert), 0), p.rows_each);
    } else {
      first = min(max(__ldcg(p.groups + expert), 0), p.rows);
      rows = max(min(__ldcg(p.groups + expert + 1), p.rows) - first, 0);
    }
  }
  write_tiles<Gemms>(p, rows, counts, [&] {
    __syncthreads();
    return first;
  });
}

}  // namespace

void launch_group_tiles(const GroupParams& p, cudaStream_t stream) {
  if (p.experts > kMostExperts) throw std::runtime_error("vllm_humming: more than 1024 local experts are not supported");
  launch(p.gemms == 1 ? group_tiles<1> : group_tiles<2>, 1, kThreads, 0, stream, p);
}

}  // namespace vllm_humming
