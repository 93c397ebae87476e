// SPDX-License-Identifier: Apache-2.0
// A pair tile's producers: scheduler, loaders, and the warps that decode weights.
#pragma once
#include "../mainloop_fp8.cuh"
#include "../producer.cuh"
#include "pair_tile.cuh"

namespace vllm_humming::gemm {

// Takes tiles for the cluster: the first CTA draws, the other is told. Two places for that are enough: a third tile is drawn when the first
// has left a buffer of the ring of tile infos, long after both CTAs' loaders began it.
template <typename C, Stage S, typename Tiles>
__device__ __forceinline__ void publish_pairs(const GemmParams& p, const PairShared& s, int lane, int rank, const Tiles& tiles) {
  const int total = tiles.total() * p.column_tiles, clusters = gridDim.x / 2;
  Ring<C::kInfos> infos;
  Ring<2> mail;
  for (int t = blockIdx.x / 2; t < total;) {
    publish<C>(p, s, infos, tiles, tiles.at(t / p.column_tiles), (t % p.column_tiles * 2 + rank) * C::kTileBlocks, lane, S, false);
    infos.next();
    ptx::mbarrier_wait(s.info_empty + infos.at * 8, infos.parity ^ 1);
    if (!p.tiles) {
      t += clusters;
      continue;
    }
    const uint32_t next = s.next + mail.at * 4, full = s.next_full + mail.at * 8;
    if (rank == 0) {
      if (lane == 0) {
        t = clusters + atomicAdd(p.next_tile, 1);
        ptx::store_async_4(ptx::map_shared(next, 1), t, ptx::map_shared(full, 1));
      }
      t = __shfl_sync(~0u, t, 0);
    } else {
      if (lane == 0) ptx::mbarrier_arrive_expect_tx(full, 4);
      ptx::mbarrier_wait_cluster(full, mail.parity);
      t = int(ptx::load_shared_4(next));
    }
    mail.next();
  }
  publish<C>(p, s, infos, tiles, TokenTile{-1, 0, 0, 0}, 0, lane, S, false);
}

template <typename C, Stage S>
__device__ __forceinline__ void schedule_pairs(const GemmParams& p, const PairShared& s, int lane, int rank) {
  if constexpr (S == Stage::kDown) {
    if (!p.tiles) return publish_pairs<C, S>(p, s, lane, rank, PlainTiles<C>{{p}});
  }
  if (p.list_is_new || (S == Stage::kUp && p.row_weight)) ptx::grid_dependency_wait();
  publish_pairs<C, S>(p, s, lane, rank, ListedTiles{{p}});
}

// The loader warps: weights, tokens (each CTA every other box, for both), token scales.
template <typename C>
__device__ __forceinline__ void load_pair(const GemmParams& p, const CUtensorMap* map, const PairShared& s, int warp, int lane, int rank) {
  if (warp == 0) {
    if (lane == 0) load_all_weights<C>(OneGemm{p}, s);
  } else if (warp == 1) {
    if (lane > 0) return;
    ptx::tensor_map_prefetch(map);
    ptx::grid_dependency_wait();
    for_each_stage<C>(OneGemm{p}, s, [&](const GemmParams&, const TokenTile& tile, int, const TileInfo<C>&, int kb, int stage) {
      const uint32_t full = s.full + stage * 8, dst = s.tokens + stage * C::kTokenBytes;
      const int rows = (tile.count + C::kBoxRows - 1) / C::kBoxRows * C::kBoxRows;
      ptx::mbarrier_arrive_expect_tx(full, rows * kBlockK);
#pragma unroll 1
      for (int r = rank * C::kBoxRows; r < rows; r += 2 * C::kBoxRows)
        ptx::tensor_load_multicast(dst + r * kBlockK, map, kb * kBlockK, tile.row + r, full, 3);
    });
  } else {
    ptx::grid_dependency_wait();
    ScaleShare<C> share;
    for_each_stage<C>(
        OneGemm{p}, s,
        [&](const GemmParams&, const TokenTile& tile, int, const TileInfo<C>&, int, int stage) { share.publish(s, tile, stage, lane); },
        [&](const TokenTile& tile, int kb) { share.fetch(p, tile, kb, lane); });
  }
}

// Codes and group scales of a stage to e4m3 in rows of 128 K, swizzled as wgmma wants them. Without a tile's weight rows it decodes whatever
// lies there: nothing is stored of that.
template <typename C>
__device__ __forceinline__ void decode_stages(const GemmParams& p, const PairShared& s, int thread) {
  Ring<C::kStages> ring;
  Ring<C::kDecoded> out;
  Ring<C::kInfos> infos;
  const int lane = thread % 32, g = lane / 4, q = lane % 4;
  const Fp8Fragment at(s.weights, thread);
  const uint32_t place = s.decoded + (thread / 32 * 16 + g) * kBlockK + (g << 4) + q * 4;
  while (true) {
    ptx::mbarrier_wait(s.info_full + infos.at * 8, infos.parity);
    if (TileInfo<C>(s, infos.at).tile().expert < 0) break;
    for (int kb = 0; kb < p.k_blocks; ++kb) {
      ptx::mbarrier_wait(s.full + ring.at * 8, ring.parity);
      ptx::mbarrier_wait(s.decoded_empty + out.at * 8, out.parity ^ 1);
      const uint32_t to = place + out.at * C::kDecodedBytes;
#pragma unroll
      for (int b = 0; b < C::kTileBlocks; ++b) {
        Fp8Chunk chunk;
        chunk.load(at, ring.at * C::kWeightBytes + b * C::kChunkBytes);
#pragma unroll
        for (int step = 0; step < kFp8Steps; ++step) {
          uint32_t a[4];  // rows g, g + 8: first 16 K; the same: second 16 K
          chunk.decode(step, a);
#pragma unroll
          for (int i = 0; i < 4; ++i)
            ptx::store_shared_4((to ^ ((2 * step + i / 2) << 4)) + b * (kBlockRows * kBlockK) + i % 2 * (8 * kBlockK), a[i]);
        }
      }
      ptx::async_proxy_fence();
      __syncwarp();
      if (lane == 0) {
        ptx::mbarrier_arrive(s.decoded_full + out.at * 8);
        ptx::mbarrier_arrive(s.empty + ring.at * 8);
      }
      ring.next();
      out.next();
    }
    if (kEveryThreadArrives) ptx::mbarrier_arrive(s.info_empty + infos.at * 8);
    infos.next();
  }
}

}  // namespace vllm_humming::gemm
