// SPDX-License-Identifier: Apache-2.0
// Both GEMMs of a layer in one kernel: the weights stream on from one into the other, and CTAs that run out of up tiles take down tiles.
//
// Roles and loops are those of gemm.cuh. Tiles are numbered through: the up GEMM's, token tile by token tile, then the down GEMM's in the same order.
// CTAs take them in that order. A down tile waits for the h of its own token tile only, which is mostly long done: a CTA's scheduler counts the up
// tiles that its consumers have stored in `ready`. Nobody waits for a tile that has not been taken by a running CTA, and up tiles wait for none, so
// any number of CTAs comes to the end.
#pragma once
#include "gemm.cuh"

namespace vllm_humming::gemm {

// The parameters of a tile's GEMM.
struct EitherGemm {
  const FusedParams& p;
  template <typename Info>
  __device__ __forceinline__ const GemmParams& operator()(const Info& info) const {
    return p.gemm[int(info.stage())];
  }
};

__device__ __forceinline__ int take(const FusedParams& p, int lane) { return lane == 0 ? atomicAdd(p.next, 1) : 0; }

// A tile has left its buffer of tile infos, so its consumers have stored it.
template <typename C>
__device__ __forceinline__ void tell_stored(const FusedParams& p, const TileInfo<C>& info, int lane) {
  if (lane == 0 && info.stage() == Stage::kUp) ptx::add_release(p.ready + info.token_tile(), 1);
}

// `first`: in lane 0, the first tile taken.
template <typename C, typename Tiles>
__device__ __forceinline__ void publish_fused(const FusedParams& p, const Shared& s, int lane, const Tiles& tiles, int first) {
  const int up = tiles.total() * p.gemm[0].column_tiles, total = up + tiles.total() * p.gemm[1].column_tiles;
  static_assert(C::kInfos == 2);
  Ring<C::kInfos> infos;
  int published = 0;
  for (int t = __shfl_sync(~0u, first, 0); t < total;) {
    const Stage stage = t < up ? Stage::kUp : Stage::kDown;
    const GemmParams& g = p.gemm[int(stage)];
    const int i = t < up ? t : t - up, token_tile = i / g.column_tiles;
    if (stage == Stage::kDown || g.row_weight) ptx::grid_dependency_wait();  // slots and router weights may be the sorting copy's
    publish<C>(g, s, infos, tiles, tiles.at(token_tile), i % g.column_tiles * C::kTileBlocks, lane, stage, C::kFusedGathers, token_tile);
    infos.next();
    ptx::mbarrier_wait(s.info_empty + infos.at * 8, infos.parity ^ 1);
    if (++published > 1) tell_stored<C>(p, TileInfo<C>(s, infos.at), lane);
    t = __shfl_sync(~0u, take(p, lane), 0);
  }
  publish<C>(p.gemm[0], s, infos, tiles, TokenTile{-1, 0, 0, 0}, 0, lane, Stage::kUp, false);
  if (published == 0) return;
  infos.next();
  ptx::mbarrier_wait(s.info_empty + infos.at * 8, infos.parity ^ 1);
  tell_stored<C>(p, TileInfo<C>(s, infos.at), lane);
}

template <typename C>
__device__ __forceinline__ void schedule_fused(const FusedParams& p, const Shared& s, int lane) {
  if constexpr (C::kFew) {
    if (p.few.topk_ids) {
      ptx::grid_dependency_wait();
      const int first = take(p, lane);
      return publish_fused<C>(p, s, lane, FewTiles<C>(p.few, s, lane), first);
    }
  }
  if (C::kFusedGathers) ptx::grid_dependency_wait();  // the kernel ahead makes the list, or else it is older: see kListIsOlder
  const int first = take(p, lane);
  publish_fused<C>(p, s, lane, ListedTiles{{p.gemm[0]}}, first);
}

// h is read by tensor or bulk copies: fences between the proxies on both sides.
template <typename C>
constexpr bool kAsyncReads = !C::kFusedGathers || C::kTokenRows;

// Until the h of a token tile is complete.
template <typename C>
__device__ __forceinline__ void wait_for_h(const FusedParams& p, int token_tile) {
  while (ptx::load_acquire(p.ready + token_tile) < p.gemm[0].column_tiles) {}
}

template <typename C>
__device__ __forceinline__ void load_fused(const FusedParams& p, const CUtensorMap* up_map, const CUtensorMap* down_map, const Shared& s,
                                           int thread) {
  const int warp = thread / 32, lane = thread % 32;
  if (warp == 0) {
    if (lane == 0) load_all_weights<C>(EitherGemm{p}, s);
  } else if constexpr (C::kFusedGathers) {
    ptx::grid_dependency_wait();
    copy_tokens<C>(
        EitherGemm{p}, s, warp - 1, lane,
        [&](const TileInfo<C>& info) {
          if (info.stage() == Stage::kUp) return;
          if (lane == 0) wait_for_h<C>(p, info.token_tile());
          __syncwarp();
          if constexpr (kAsyncReads<C>) ptx::async_proxy_fence_global();
        },
        [](const GemmParams& g, const TokenTile& tile, const TileInfo<C>& info, int row) {
          return info.stage() == Stage::kUp ? ptx::load_shared_4(info.slots() + row * 4) : RowsTogether()(g, tile, info, row);
        });
  } else {
    if (lane > 0) return;
    ptx::tensor_map_prefetch(up_map);
    ptx::tensor_map_prefetch(down_map);
    ptx::grid_dependency_wait();
    for_each_stage<C>(
        EitherGemm{p}, s,
        [&](const GemmParams&, const TokenTile& tile, int, const TileInfo<C>& info, int kb, int stage) {
          const CUtensorMap* map = info.stage() == Stage::kUp ? up_map : down_map;
          for (int half = warp - 1; half < 2; half += C::kTokenWarps) load_sorted<C>(map, s, tile, kb, half, stage);
        },
        Nothing(),
        [&](const GemmParams&, const TokenTile&, int, const TileInfo<C>& info, int) {
          if (info.stage() == Stage::kUp) return;
          wait_for_h<C>(p, info.token_tile());
          ptx::async_proxy_fence_global();
        });
  }
}

template <typename T, typename C>
__device__ __forceinline__ void consume_fused(const FusedParams& p, const Shared& s, int warpgroup) {
  Ring<C::kStages> ring;
  Ring<C::kInfos> infos;
  Sums sums;
  int store_buffer = 0;
  while (true) {
    const TileInfo<C> info(s, infos.at);
    ptx::mbarrier_wait(s.info_full + infos.at * 8, infos.parity);
    const TokenTile tile = info.tile();
    if (ptx::uniform(tile.expert < 0)) break;
    const bool up = ptx::uniform(info.stage() == Stage::kUp);
    const int row_blocks = up ? p.gemm[0].row_blocks : p.gemm[1].row_blocks, k_blocks = up ? p.gemm[0].k_blocks : p.gemm[1].k_blocks;
    const int block0 = int(ptx::load_shared_4(info.block())) + warpgroup / C::kSplitK * C::kBlocks;
    if (ptx::uniform(block0 < row_blocks)) {
      float acc[C::kBlocks][C::kMaxWidth / 2] = {};
      multiply<T, C>(k_blocks, s, ring, tile.width, warpgroup, acc);
      if (sums.add<C>(s, warpgroup, tile.width, acc)) {
        if (up) store<T, C, Stage::kUp>(p.gemm[0], s, info, tile, warpgroup, block0, store_buffer, acc);
        else store<T, C, Stage::kDown>(p.gemm[1], s, info, tile, warpgroup, block0, store_buffer, acc);
        sums.release<C>(s, warpgroup);
      }
    } else {
      skip_stages<C>(stages_of<C>(k_blocks), s, ring);
    }
    if (up && kAsyncReads<C>) ptx::async_proxy_fence_global();
    __syncwarp();
    if (kEveryThreadArrives || threadIdx.x % 32 == 0) ptx::mbarrier_arrive(s.info_empty + infos.at * 8);
    infos.next();
  }
}

template <typename T, typename C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas)
    fused_kernel(const __grid_constant__ FusedParams p, const __grid_constant__ CUtensorMap up_map, const __grid_constant__ CUtensorMap down_map) {
  constexpr int kProducerRegisters = producer_registers<C>(C::kFusedGathers);
  constexpr int kTokenThreads = C::kFusedGathers ? 32 * C::kTokenWarps : C::kTokenWarps;
  extern __shared__ __align__(1024) uint8_t shared_raw[];
  const Shared s = carve<C>(ptx::smem_address(shared_raw));
  if (threadIdx.x == 0) init_barriers<C>(s, C::kFusedGathers ? copy_arrivals<C>() : 2, kTokenThreads);
  __syncthreads();
  if (threadIdx.x >= C::kConsumers) {
    if constexpr (C::kSplitRegisters) ptx::registers_release<kProducerRegisters>();
    const int thread = threadIdx.x - C::kConsumers;
    if (thread < C::kLoaders) load_fused<C>(p, &up_map, &down_map, s, thread);
    else schedule_fused<C>(p, s, thread - C::kLoaders);
  } else {
    if constexpr (C::kSplitRegisters) ptx::registers_acquire<C::template kConsumerRegisters<kProducerRegisters>>();
    ptx::grid_dependency_wait();
    ptx::grid_dependency_launch();  // after the wait: the next kernel may read what this one's predecessors wrote
    consume_fused<T, C>(p, s, threadIdx.x / 128);
  }
}

}  // namespace vllm_humming::gemm
