// SPDX-License-Identifier: Apache-2.0
// The producer warps: tile infos, packed weights by bulk copy, tokens by tensor copy (sorted rows) or cp.async (gathered rows).
#pragma once
#include <cuda.h>
#include <type_traits>
#include "tile.cuh"

namespace vllm_humming::gemm {

// Waits for a free info buffer and fills it. Rows and router weights are read past L1, which may hold what these addresses were in an
// earlier layer.
template <typename C, Stage S>
__device__ __forceinline__ void publish(const GemmParams& p, const Shared& s, const Ring<C::kInfos>& ring, const TokenTile& tile, int block0, int lane) {
  const TileInfo<C> info(s, ring.at);
  const uint32_t full = s.info_full + ring.at * 8;
  ptx::mbarrier_wait(s.info_empty + ring.at * 8, ring.parity ^ 1);
#pragma unroll 1
  for (int r = lane; r < tile.count; r += 32) {
    const int row = tile.row + r;
    if (S == Stage::kDown || kGathers<C, S>) {
      const uint32_t slot = p.slots ? __ldcg(p.slots + row) : row;
      ptx::store_shared_4(info.slots() + r * 4, S == Stage::kDown ? slot : slot / uint32_t(p.top_k) * uint32_t(p.x_stride / 8));
    }
    ptx::store_shared_4(info.weights() + r * 4, __float_as_uint(p.row_weight ? __ldcg(p.row_weight + row) : 1.0f));
  }
  if (lane == 0) {
    ptx::store_shared_16(info.at, make_uint4(tile.expert, tile.row, tile.count, tile.width));
    ptx::store_shared_4(info.block(), block0);
  }
  __syncwarp();
  if (lane > 0) return;
  if (tile.expert < 0) return ptx::mbarrier_arrive(full);
  const uint32_t bytes = min(C::kTileBlocks, p.row_blocks - block0) * kBlockRows * 4;
  const size_t first = (size_t(tile.expert) * p.row_blocks + block0) * kBlockRows;
  ptx::mbarrier_arrive_expect_tx(full, p.bias ? 2 * bytes : bytes);
  ptx::bulk_load(info.row_scale(), p.row_scale + first, bytes, full);
  if (p.bias) ptx::bulk_load(info.bias(), p.bias + first, bytes, full);
}

__device__ __forceinline__ TokenTile token_tile(const GemmParams& p, int index) {
  const int4 v = __ldcg(reinterpret_cast<const int4*>(p.tiles) + index);
  return {v.x, v.y, v.z, v.w};
}

// The scheduler warp: walks this CTA's tiles ahead of the loaders, whose copies then never wait for a tile's reads from global memory.
template <typename C, Stage S>
__device__ __forceinline__ void schedule(const GemmParams& p, const Shared& s, int lane) {
  // The down GEMM's tile list and rows are older than the kernel before it.
  if constexpr (S == Stage::kUp) ptx::grid_dependency_wait();
  const int total = __ldcg(p.tile_count) * p.column_tiles;
  Ring<C::kInfos> infos;
  for (int t = blockIdx.x; t < total; t += gridDim.x) {
    publish<C, S>(p, s, infos, token_tile(p, t / p.column_tiles), t % p.column_tiles * C::kTileBlocks, lane);
    infos.next();
  }
  publish<C, S>(p, s, infos, TokenTile{-1, 0, 0, 0}, 0, lane);
}

// Bytes of a stage that load_sorted brings.
template <typename C>
__device__ __forceinline__ uint32_t sorted_bytes(int count) {
  return (count + C::kBoxRows - 1) / C::kBoxRows * C::kBoxRows * kBlockK * 2;
}

template <typename C>
__device__ __forceinline__ void load_weights(const GemmParams& p, const Shared& s, const TokenTile& tile, int block0, int kb, int stage,
                                             uint64_t policy, uint32_t token_bytes) {
  const int blocks = min(C::kTileBlocks, p.row_blocks - block0);
  const uint8_t* w = p.packed + ((size_t(tile.expert) * p.row_blocks + block0) * p.k_blocks + kb) * kChunkBytes;
  const uint32_t full = s.full + stage * 8, dst = s.weights + stage * C::kWeightBytes;
  ptx::mbarrier_arrive_expect_tx(full, blocks * kChunkBytes + token_bytes);
  for (int b = 0; b < blocks; ++b) ptx::bulk_load(dst + b * kChunkBytes, w + size_t(b) * p.k_blocks * kChunkBytes, kChunkBytes, full, policy);
}

// Tokens whose rows lie together: 64 columns x kBoxRows rows a copy, swizzled by the copy engine. Run by thread 0 alone.
template <typename C>
__device__ __forceinline__ void load_sorted(const CUtensorMap* map, const Shared& s, const TokenTile& tile, int kb, int stage) {
  const uint32_t full = s.full + stage * 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t dst = s.tokens + stage * C::kTokenBytes + half * (C::kMaxWidth * 128);
#pragma unroll 1  // registers
    for (int r = 0; r < tile.count; r += C::kBoxRows) ptx::tensor_load(dst + r * 128, map, kb * kBlockK + half * 64, tile.row + r, full);
  }
}

// Tokens gathered by slot. They reach shared memory by the generic proxy and wgmma reads them by the async proxy: each thread waits for
// its own copies and fences before it arrives. It does so kLag stages late, to keep kLag + 1 stages of copies in flight.
template <typename C>
struct Gather {
  static constexpr int kChunks = kBlockK * 2 / 16;                 // 16-byte chunks of a row's stage
  static constexpr int kRowStep = C::kLoaders / kChunks;
  static constexpr int kLag = C::kStages / 2;
  // A stage is released after the first wgmma of the next, so to get stage n the producer must have announced n - kStages + 1.
  static_assert(kLag + 2 <= C::kStages || C::kMaxWidth <= C::kNarrow, "the gather would wait for a stage it has not announced");
  const int chunk, first_row;
  int issued = 0;                                                  // stages
  __device__ __forceinline__ explicit Gather(int thread) : chunk(thread % kChunks), first_row(thread / kChunks) {}

  // sources: of each row, in 16-byte units from p.x (32 bits reach 64 GiB).
  __device__ __forceinline__ void load(const GemmParams& p, const Shared& s, uint32_t sources, int count, int kb, int stage) {
    const uint32_t dst = s.tokens + stage * C::kTokenBytes + (chunk / 8) * (C::kMaxWidth * 128);
    const bool valid = kb * kBlockK + chunk * 8 < p.x_columns;
    const uint4* x = static_cast<const uint4*>(p.x) + (valid ? kb * kChunks + chunk : 0);
#pragma unroll 4
    for (int r = first_row; r < count; r += kRowStep)
      ptx::copy16(dst + r * 128 + ((chunk % 8 ^ (r & 7)) << 4), x + ptx::load_shared_4(sources + r * 4), valid);
    if constexpr (C::kMaxWidth <= C::kNarrow) {
      ptx::copy16_arrive(s.full + stage * 8);                      // mma.sync reads them by the generic proxy too
    } else {
      ptx::copy16_commit();
      if (issued++ >= kLag) announce<kLag>(s.full + (stage + C::kStages - kLag) % C::kStages * 8);
    }
  }
  // The stages not announced yet, the last of them at `stage`.
  __device__ __forceinline__ void finish(const Shared& s, int stage) {
    ptx::copy16_wait<0>();                                         // no thread leaves with copies in flight
    if constexpr (C::kMaxWidth > C::kNarrow) {
      ptx::fence_proxy_async();
      for (int i = min(issued, kLag) - 1; i >= 0; --i) ptx::mbarrier_arrive(s.full + (stage + C::kStages - i) % C::kStages * 8);
      issued = 0;
    }
  }

 private:
  template <int StillInFlight>
  __device__ __forceinline__ void announce(uint32_t full) {
    ptx::copy16_wait<StillInFlight>();
    ptx::fence_proxy_async();
    ptx::mbarrier_arrive(full);
  }
};

// The loader warps. Where tokens are sorted one thread does it all.
template <typename C, Stage S>
__device__ __forceinline__ void load(const GemmParams& p, const CUtensorMap* map, const Shared& s, int thread) {
  constexpr bool kGather = kGathers<C, S>;
  if (!kGather && thread > 0) return;
  const uint64_t policy = p.evict_first ? ptx::policy_evict_first() : ptx::policy_evict_normal();
  // The down GEMM's tile list is older than the kernel before this one, so its first weights need not wait for that kernel's rows.
  int ahead = 0;
  if constexpr (S == Stage::kDown) {
    if (blockIdx.x < __ldcg(p.tile_count) * p.column_tiles) {
      const TokenTile tile = token_tile(p, blockIdx.x / p.column_tiles);
      ahead = min(C::kStages, p.k_blocks);
      for (int kb = 0; kb < ahead; ++kb)
        load_weights<C>(p, s, tile, blockIdx.x % p.column_tiles * C::kTileBlocks, kb, kb, policy, sorted_bytes<C>(tile.count));
    }
  }
  ptx::grid_dependency_wait();
  Ring<C::kStages> ring;
  Ring<C::kInfos> infos;
  Gather<C> gather(thread);
  while (true) {
    const TileInfo<C> info(s, infos.at);
    ptx::mbarrier_wait(s.info_full + infos.at * 8, infos.parity);
    const TokenTile tile = info.tile();
    if (tile.expert < 0) break;
    const int block0 = int(ptx::load_shared_4(info.block()));
    const uint32_t token_bytes = kGather ? 0 : sorted_bytes<C>(tile.count);
    for (int kb = 0; kb < p.k_blocks; ++kb) {
      ptx::mbarrier_wait(s.empty + ring.at * 8, ring.parity ^ 1);
      if (ahead > 0) --ahead;
      else if (thread == 0) load_weights<C>(p, s, tile, block0, kb, ring.at, policy, token_bytes);
      if constexpr (kGather) gather.load(p, s, info.slots(), tile.count, kb, ring.at);
      else load_sorted<C>(map, s, tile, kb, ring.at);
      ring.next();
    }
    // A tile shorter than the lag is announced at once: the next info may be waiting for its end.
    if constexpr (kGather)
      if (C::kMaxWidth > C::kNarrow && p.k_blocks < Gather<C>::kLag) gather.finish(s, (ring.at + C::kStages - 1) % C::kStages);
    infos.next();
  }
  if constexpr (kGather) gather.finish(s, (ring.at + C::kStages - 1) % C::kStages);
}

}  // namespace vllm_humming::gemm
