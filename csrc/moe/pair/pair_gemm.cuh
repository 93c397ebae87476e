// SPDX-License-Identifier: Apache-2.0
// The grouped GEMM by pair tiles: D[tokens x packed weight rows], FP8, for experts with many tokens.
//
//   producer warps                       decoder warps                        consumer warpgroups
//   scheduler: tile info --------------> info_full                            every other 64 tokens each
//   loaders: codes, tokens, scales ----> full[stage]: e4m3 to shared memory -> decoded_full: wgmma, both operands in shared memory
//     (tokens: half of them, for both CTAs)                                     release empty[stage] of both CTAs, decoded_empty
//                                                                             epilogue; release info_empty
#pragma once
#include "pair_consumer.cuh"

namespace vllm_humming::gemm {

template <typename T, typename C, Stage S>
__device__ __forceinline__ void consume_pairs(const GemmParams& p, const PairShared& s, int warpgroup, int rank) {
  Ring<C::kStages> ring;
  Ring<C::kDecoded> decoded;
  Ring<C::kInfos> infos;
  Ring<1> exchanges;
  while (true) {
    const TileInfo<C> info(s, infos.at);
    ptx::mbarrier_wait(s.info_full + infos.at * 8, infos.parity);
    if (ptx::uniform(info.tile().expert < 0)) break;
    float acc[C::kBlocks][kPairValues] = {};
    {
      const int width = info.tile().width, blocks = pair_blocks(width, warpgroup);
      if (ptx::uniform(blocks == 2)) multiply_pair<C, 2>(p, s, ring, decoded, warpgroup, rank, acc);
      else if (ptx::uniform(blocks == 1)) multiply_pair<C, 1>(p, s, ring, decoded, warpgroup, rank, acc);
      else skip_pair<C>(p, s, ring, decoded, rank);
    }
    // Read again: registers are scarce in the main loop.
    const TokenTile tile = info.tile();
    const int blocks = pair_blocks(tile.width, warpgroup), block0 = int(ptx::load_shared_4(info.block()));
    if (ptx::uniform(block0 >= p.row_blocks)) {                    // the other CTA has the last rows; of a gated layer both have some
    } else if constexpr (S == Stage::kUp) {
      if (ptx::uniform(blocks > 0)) store_pair_fp8<C>(p, s, info, tile, warpgroup, blocks, block0, rank, exchanges, acc);
    } else {
      store_pair<T, C>(p, s, info, tile, warpgroup, blocks, block0, acc);
    }
    __syncwarp();
    if (kEveryThreadArrives || threadIdx.x % 32 == 0) ptx::mbarrier_arrive(s.info_empty + infos.at * 8);
    infos.next();
  }
}

template <typename T, typename C, Stage S>
__global__ void __launch_bounds__(C::kThreads, 1) pair_kernel(const __grid_constant__ GemmParams p, const __grid_constant__ CUtensorMap map) {
  constexpr int kLoaderArrivals = 1 + 1 + 32;                      // codes, tokens, scales
  extern __shared__ __align__(1024) uint8_t shared_raw[];
  const PairShared s = carve_pair<C>(ptx::smem_address(shared_raw));
  const int rank = int(ptx::cluster_rank());
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kStages; ++i) {
      ptx::mbarrier_init(s.full + i * 8, kLoaderArrivals);
      ptx::mbarrier_init(s.empty + i * 8, (2 * C::kConsumers + C::kDecoders) / 32);
    }
    for (int i = 0; i < C::kDecoded; ++i) {
      ptx::mbarrier_init(s.decoded_full + i * 8, C::kDecoders / 32);
      ptx::mbarrier_init(s.decoded_empty + i * 8, C::kConsumers / 32);
    }
    for (int i = 0; i < C::kInfos; ++i) {
      ptx::mbarrier_init(s.info_full + i * 8, kEveryThreadArrives ? 32 : 1);
      ptx::mbarrier_init(s.info_empty + i * 8, kEveryThreadArrives ? C::kConsumers + C::kDecoders + kLoaderArrivals : C::kConsumers / 32);
    }
    for (int i = 0; i < C::kWarps; ++i) {
      ptx::mbarrier_init(s.amax_full + i * 8, 1);
      ptx::mbarrier_init(s.amax_empty + i * 8, 1);
    }
    for (int i = 0; i < C::kMail; ++i) ptx::mbarrier_init(s.next_full + i * 8, 1);
    ptx::mbarrier_init_fence();
  }
  ptx::cluster_barrier();                                          // no copy or arrival may reach a CTA that is not ready
  if (threadIdx.x >= C::kConsumers + C::kDecoders) {
    ptx::registers_release<C::kProducerRegisters>();
    const int thread = threadIdx.x - C::kConsumers - C::kDecoders, warp = thread / 32, lane = thread % 32;
    if (warp < 3) load_pair<C>(p, &map, s, warp, lane, rank);
    else schedule_pairs<C, S>(p, s, lane, rank);
  } else if (threadIdx.x >= C::kConsumers) {
    ptx::registers_release<C::kDecoderRegisters>();
    decode_stages<C>(p, s, threadIdx.x - C::kConsumers);
  } else {
    ptx::registers_acquire<C::kConsumerRegisters>();
    ptx::grid_dependency_wait();
    ptx::grid_dependency_launch();
    consume_pairs<T, C, S>(p, s, threadIdx.x / 128, rank);
  }
  ptx::cluster_barrier();                                          // the other CTA may still arrive here
}

}  // namespace vllm_humming::gemm
