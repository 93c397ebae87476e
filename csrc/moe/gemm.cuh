// SPDX-License-Identifier: Apache-2.0
// Grouped GEMM with 4-bit weights, swap-AB: D[weight rows x tokens] = W[rows x K] * X[tokens x K]^T.
//
//   producer warps                     consumer warpgroups (kWarpgroups, each kBlocks blocks of 64 weight rows)
//   --------------                     ------------------------------------------------------------------------
//   scheduler: tile info ------------> info_full[kInfos]: expert, rows, slots, router weights
//   loaders: bulk copy of packed W --> full[stage]:  load codes, decode to registers --> wgmma (A registers, B tokens)
//     tensor copy or gather of X                     release empty[stage]; row scales and bias come with a tile's first stage
//                                      epilogue: scale, bias, activation | router weight --> store; release info_empty[kInfos]
//
// Persistent CTAs take (token tile, column tile) pairs from one list, as they come free. The ring of stages
// runs on across tiles, so the next tile's weights arrive during this tile's epilogue, and the warpgroups of a CTA may be a few stages apart. A
// tile runs with the token width that its list entry names, one of the configuration's Widths.
#pragma once
#include "epilogue.cuh"
#include "epilogue_fp8.cuh"
#include "mainloop.cuh"
#include "mainloop_fp8.cuh"
#include "producer.cuh"
#include "sum.cuh"

namespace vllm_humming::gemm {

// Multiplies with the narrowest compiled width that holds the tile. One accumulator array for all widths: separate ones would count as
// live together.
template <typename T, typename C, int I = 0>
__device__ __forceinline__ void multiply(int k_blocks, const Shared& s, Ring<C::kStages>& ring, int width, int warpgroup,
                                         float (&acc)[C::kBlocks][C::kMaxWidth / 2]) {
  constexpr int N = C::W::kAt[I];
  if constexpr (I + 1 < C::W::kCount) {
    if (ptx::uniform(width > N)) return multiply<T, C, I + 1>(k_blocks, s, ring, width, warpgroup, acc);
  }
  if constexpr (C::kFp8) {
    multiply_fp8<C, N>(k_blocks, s, ring, warpgroup, acc);
  } else {
    if constexpr (N <= C::kNarrow) multiply_narrow<T, C, N>(k_blocks, s, ring, warpgroup, acc);
    else multiply_wide<T, C, N>(k_blocks, s, ring, warpgroup, acc);
  }
}

template <typename T, typename C, Stage S>
__device__ __forceinline__ void consume(const GemmParams& p, const Shared& s, int warpgroup) {
  Ring<C::kStages> ring;
  Ring<C::kInfos> infos;
  Sums sums;
  int store_buffer = 0;
  while (true) {
    const TileInfo<C> info(s, infos.at);
    ptx::mbarrier_wait(s.info_full + infos.at * 8, infos.parity);
    const TokenTile tile = info.tile();
    if (ptx::uniform(tile.expert < 0)) break;
    const int block0 = int(ptx::load_shared_4(info.block())) + warpgroup / C::kSplitK * C::kBlocks;
    if (ptx::uniform(block0 < p.row_blocks)) {
      float acc[C::kBlocks][C::kMaxWidth / 2] = {};
      multiply<T, C>(p.k_blocks, s, ring, tile.width, warpgroup, acc);
      if (sums.add<C>(s, warpgroup, tile.width, acc)) {
        if constexpr (C::kFp8 && S == Stage::kUp) store_fp8<C>(p, s, info, tile, warpgroup, block0, store_buffer, acc);
        else store<T, C, S>(p, s, info, tile, warpgroup, block0, store_buffer, acc);
        sums.release<C>(s, warpgroup);
      }
    } else {
      skip_stages<C>(stages_of<C>(p.k_blocks), s, ring);
    }
    __syncwarp();
    if (kEveryThreadArrives || threadIdx.x % 32 == 0) ptx::mbarrier_arrive(s.info_empty + infos.at * 8);
    infos.next();
  }
}

// Accumulators of 160 tokens leave little; where tokens are sorted the producers can do with less.
template <typename C>
constexpr int producer_registers(bool gathers) {
  if (C::kFp8 && C::kCtas == 2) return 48;
  return (C::kMaxWidth > 128 || C::kMaxWidth <= 16 || C::kCtas > 2 || C::kFp8) && !gathers ? 40 : 56;
}

// token_arrivals: of a stage; token_threads: that load tokens.
template <typename C>
__device__ __forceinline__ void init_barriers(const Shared& s, int token_arrivals, int token_threads) {
  for (int i = 0; i < C::kStages; ++i) {
    ptx::mbarrier_init(s.full + i * 8, 1 + token_arrivals);
    ptx::mbarrier_init(s.empty + i * 8, C::kConsumers / 32);
  }
  for (int i = 0; i < C::kInfos; ++i) {
    ptx::mbarrier_init(s.info_full + i * 8, kEveryThreadArrives ? 32 : 1);
    ptx::mbarrier_init(s.info_empty + i * 8, kEveryThreadArrives ? C::kConsumers + 1 + token_threads : C::kConsumers / 32);
  }
  if constexpr (C::kSplitK > 1) {
    for (int i = 0; i < C::kRowGroups; ++i) {
      for (int j = 0; j < 2; ++j) ptx::mbarrier_init(s.sum_full + (i * 2 + j) * 8, (C::kSplitK - 1) * Sums::kArrivals);
      ptx::mbarrier_init(s.sum_empty + i * 8, Sums::kArrivals);
    }
  }
  ptx::mbarrier_init_fence();
}

// Arrivals at a stage of warps that copy tokens.
template <typename C>
constexpr int copy_arrivals() {
  return C::kTokenRows && !kEveryThreadArrives ? C::kTokenWarps : 32 * C::kTokenWarps;
}

template <typename T, typename C, Stage S>
__global__ void __launch_bounds__(C::kThreads, C::kCtas) kernel(const __grid_constant__ GemmParams p, const __grid_constant__ CUtensorMap map) {
  constexpr int kProducerRegisters = producer_registers<C>(kGathers<C, S>);
  constexpr bool kCopies = kGathers<C, S> || C::kTokenRows;
  constexpr int kTokenThreads = kCopies ? 32 * C::kTokenWarps : C::kFp8 ? 1 + 32 : C::kTokenWarps;
  extern __shared__ __align__(1024) uint8_t shared_raw[];
  const Shared s = carve<C>(ptx::smem_address(shared_raw));
  // Sorted tokens of 16 bits arrive once a K half.
  if (threadIdx.x == 0) init_barriers<C>(s, kCopies ? copy_arrivals<C>() : C::kFp8 ? kTokenThreads : 2, kTokenThreads);
  __syncthreads();
  if (threadIdx.x >= C::kConsumers) {
    if constexpr (C::kSplitRegisters) ptx::registers_release<kProducerRegisters>();
    const int thread = threadIdx.x - C::kConsumers;
    if (thread < C::kLoaders) load<C, S>(p, &map, s, thread);
    else schedule<C, S>(p, s, thread - C::kLoaders);
  } else {
    if constexpr (C::kSplitRegisters) ptx::registers_acquire<C::template kConsumerRegisters<kProducerRegisters>>();
    ptx::grid_dependency_wait();
    ptx::grid_dependency_launch();  // after the wait: the next kernel may read what this one's predecessors wrote
    consume<T, C, S>(p, s, threadIdx.x / 128);
  }
}

}  // namespace vllm_humming::gemm
