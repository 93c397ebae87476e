// SPDX-License-Identifier: Apache-2.0
// The producer warps: tile infos, packed weights by bulk copy, tokens by tensor copy (sorted rows) or cp.async (gathered rows).
#pragma once
#include <cuda.h>
#include <type_traits>
#include "few_entries.cuh"
#include "tile.cuh"

namespace vllm_humming::gemm {

// In a layer, between the kernel that makes the tile list and a GEMM that reads sorted rows runs the one that makes those rows (the sorting
// copy, or the up GEMM), and it has waited for the list: the list needs no wait, nor do the first weights. Slots and router weights may be the
// sorting copy's: the down GEMM needs no wait for them, the up GEMM does. Where the caller has sorted the rows no kernel may lie between:
// GemmParams::list_is_new.
template <typename C, Stage S>
constexpr bool kListIsOlder = !kGathers<C, S>;

// Fills a tile info whose buffer is free. Rows and router weights are read past L1, which may hold what these addresses were in an
// earlier layer.
template <typename C, typename Tiles>
__device__ __forceinline__ void publish(const GemmParams& p, const Shared& s, const Ring<C::kInfos>& ring, const Tiles& tiles, const TokenTile& tile,
                                        int block0, int lane, Stage stage, bool gathers, int token_tile = 0) {
  const TileInfo<C> info(s, ring.at);
  const uint32_t full = s.info_full + ring.at * 8;
#pragma unroll 1
  for (int r = lane; r < tile.count; r += 32) {
    const int row = tile.row + r;
    if (stage == Stage::kDown || gathers) {
      const uint32_t slot = tiles.slot(row);
      ptx::store_shared_4(info.slots() + r * 4, stage == Stage::kDown ? slot : slot / uint32_t(p.top_k) * uint32_t(p.x_stride / 8));
    }
    ptx::store_shared_4(info.weights() + r * 4, __float_as_uint(p.row_weight ? __ldcg(p.row_weight + tiles.weight(row)) : 1.0f));
  }
  if (lane == 0) {
    ptx::store_shared_16(info.at, make_uint4(tile.expert, tile.row, tile.count, tile.width));
    ptx::store_shared_16(info.block(), make_uint4(block0, int(stage), token_tile, 0));
  }
  __syncwarp();
  if (kEveryThreadArrives || lane == 0) ptx::mbarrier_arrive(full);
}

// Rows in the order of the row list, if any, and of the router weights.
struct ListedRows {
  const GemmParams& p;
  __device__ __forceinline__ int slot(int row) const { return p.slots ? __ldcg(p.slots + row) : row; }
  __device__ __forceinline__ int weight(int row) const { return row; }
};

// Token tiles of a list, shared out as CTAs come free.
struct ListedTiles : ListedRows {
  __device__ __forceinline__ int total() const { return __ldcg(p.tile_count); }
  __device__ __forceinline__ TokenTile at(int index) const {
    const int4 v = __ldcg(reinterpret_cast<const int4*>(p.tiles) + index);
    return {v.x, v.y, v.z, v.w};
  }
  __device__ __forceinline__ int after(int t, int lane) const {
    if (lane == 0) t = gridDim.x + atomicAdd(p.next_tile, 1);
    return __shfl_sync(~0u, t, 0);
  }
};

// Token tiles of one expert's p.rows, cut as a list would have them, in turns.
template <typename C>
struct PlainTiles : ListedRows {
  __device__ __forceinline__ int total() const { return (p.rows + C::kMaxWidth - 1) / C::kMaxWidth; }
  __device__ __forceinline__ TokenTile at(int index) const {
    const CutTile tile = cut_tile<typename C::W>(p.cut, index);
    return {0, tile.row, min(tile.width, p.rows - tile.row), tile.width};
  }
  __device__ __forceinline__ int after(int t, int) const { return t + gridDim.x; }
};

template <typename C, Stage S, typename Tiles>
__device__ __forceinline__ void publish_all(const GemmParams& p, const Shared& s, int lane, const Tiles& tiles) {
  const int total = tiles.total() * p.column_tiles;
  Ring<C::kInfos> infos;
  for (int t = blockIdx.x; t < total;) {
    publish<C>(p, s, infos, tiles, tiles.at(t / p.column_tiles), t % p.column_tiles * C::kTileBlocks, lane, S, kGathers<C, S>);
    infos.next();
    // Taken only when there is room for it: what a CTA has taken it must run, however late. The first of the ring's buffers are free.
    ptx::mbarrier_wait(s.info_empty + infos.at * 8, infos.parity ^ 1);
    t = tiles.after(t, lane);
  }
  publish<C>(p, s, infos, tiles, TokenTile{-1, 0, 0, 0}, 0, lane, S, false);
}

// The scheduler warp: takes this CTA's tiles, one after the other as buffers come free, ahead of the loaders, whose copies then never wait
// for a tile's reads from global memory.
template <typename C, Stage S>
__device__ __forceinline__ void schedule(const GemmParams& p, const Shared& s, int lane) {
  if constexpr (C::kFewApart) {
    if (p.few.topk_ids) {
      if constexpr (S == Stage::kUp) prepare_few(p, lane);
      return publish_all<C, S>(p, s, lane, FewTilesApart<C>(p, s, lane));
    }
  }
  if constexpr (S == Stage::kDown) {
    if (!p.tiles) return publish_all<C, S>(p, s, lane, PlainTiles<C>{{p}});  // reads nothing that a kernel ahead may have written
  }
  if (!kListIsOlder<C, S> || p.list_is_new || (S == Stage::kUp && p.row_weight)) ptx::grid_dependency_wait();
  publish_all<C, S>(p, s, lane, ListedTiles{{p}});
}

// The tile's row scales and biases. They come with its first stage: with the tile info, they kept the first weights waiting.
template <typename C>
__device__ __forceinline__ void load_row_factors(const GemmParams& p, const Shared& s, const TokenTile& tile, int block0, const TileInfo<C>& info,
                                                 int stage) {
  if (block0 >= p.row_blocks) return;                              // the second CTA of a pair
  const uint32_t full = s.full + stage * 8, bytes = min(C::kTileBlocks, p.row_blocks - block0) * kBlockRows * 4;
  const size_t first = (size_t(tile.expert) * p.row_blocks + block0) * kBlockRows;
  ptx::mbarrier_expect_tx(full, p.bias ? 2 * bytes : bytes);
  ptx::bulk_load(info.row_scale(), p.row_scale + first, bytes, full);
  if (p.bias) ptx::bulk_load(info.bias(), p.bias + first, bytes, full);
}

template <typename C>
__device__ __forceinline__ void load_weights(const GemmParams& p, const Shared& s, const TokenTile& tile, int block0, int kb, int stage,
                                             uint64_t policy) {
  const int blocks = max(0, min(C::kTileBlocks, p.row_blocks - block0));
  const uint8_t* w = p.packed + ((size_t(tile.expert) * p.row_blocks + block0) * p.k_blocks + kb * C::kStageK) * C::kChunkBytes;
  const uint32_t full = s.full + stage * 8, dst = s.weights + stage * C::kWeightBytes, bytes = chunks_of<C>(p.k_blocks, kb) * C::kChunkBytes;
  ptx::mbarrier_arrive_expect_tx(full, blocks * bytes);
  for (int b = 0; b < blocks; ++b)
    ptx::bulk_load(dst + b * C::kStageK * C::kChunkBytes, w + size_t(b) * p.k_blocks * C::kChunkBytes, bytes, full, policy);
}

// One 64-wide K half of tokens whose rows lie together: kBoxRows rows a copy, swizzled by the copy engine.
template <typename C>
__device__ __forceinline__ void load_sorted(const CUtensorMap* map, const Shared& s, const TokenTile& tile, int kb, int half, int stage) {
  const uint32_t full = s.full + stage * 8, dst = s.tokens + stage * C::kTokenBytes + half * (C::kMaxWidth * 128);
  ptx::mbarrier_arrive_expect_tx(full, (tile.count + C::kBoxRows - 1) / C::kBoxRows * C::kBoxRows * 128);
#pragma unroll 1  // registers
  for (int r = 0; r < tile.count; r += C::kBoxRows) ptx::tensor_load(dst + r * 128, map, kb * kBlockK + half * 64, tile.row + r, full);
}

// FP8 tokens: a stage's K is one 128-byte row.
template <typename C>
__device__ __forceinline__ void load_sorted_fp8(const CUtensorMap* map, const Shared& s, const TokenTile& tile, int kb, int stage) {
  const uint32_t full = s.full + stage * 8, dst = s.tokens + stage * C::kTokenBytes;
  ptx::mbarrier_arrive_expect_tx(full, (tile.count + C::kBoxRows - 1) / C::kBoxRows * C::kBoxRows * kBlockK);
#pragma unroll 1
  for (int r = 0; r < tile.count; r += C::kBoxRows) ptx::tensor_load(dst + r * kBlockK, map, kb * kBlockK, tile.row + r, full);
}
// This lane's share of the token scales of one stage, by one warp: a tile's rows start anywhere, which neither kind of bulk copy allows.
template <typename C>
struct ScaleShare {
  static constexpr int kCount = (C::kMaxWidth + 31) / 32;
  float value[kCount];
  // Past L1, which may hold what these addresses were in an earlier layer.
  __device__ __forceinline__ void fetch(const GemmParams& p, const TokenTile& tile, int kb, int lane) {
    const float* scales = p.x_scale + size_t(kb) * p.scale_stride + tile.row;
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (lane + 32 * i < tile.count) value[i] = __ldcg(scales + lane + 32 * i);
  }
  __device__ __forceinline__ void publish(const Shared& s, const TokenTile& tile, int stage, int lane) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (lane + 32 * i < tile.count)
        ptx::store_shared_4(s.scales + stage * C::kScaleBytes + scale_place<C>(lane + 32 * i) * 4, __float_as_uint(value[i]));
    ptx::mbarrier_arrive(s.full + stage * 8);
  }
};

struct Nothing {
  template <typename... Arguments>
  __device__ __forceinline__ void operator()(const Arguments&...) const {}
};

// The parameters of a tile's GEMM, where a kernel runs but one.
struct OneGemm {
  const GemmParams& p;
  template <typename Info>
  __device__ __forceinline__ const GemmParams& operator()(const Info&) const {
    return p;
  }
};

// Calls f(p, tile, block0, info, kb, stage) for every stage, number kb, of every tile, each once its buffer is free, and ahead(tile, kb) before
// that; and begin(p, tile, block0, info, stage) before a tile's first stage. gemm(info): the tile's p.
template <typename C, typename Gemm, typename F, typename Ahead, typename Begin = Nothing>
__device__ __forceinline__ void for_each_stage(const Gemm& gemm, const Shared& s, F f, Ahead ahead, Begin begin = {}) {
  Ring<C::kStages> ring;
  Ring<C::kInfos> infos;
  while (true) {
    const TileInfo<C> info(s, infos.at);
    ptx::mbarrier_wait(s.info_full + infos.at * 8, infos.parity);
    const TokenTile tile = info.tile();
    if (tile.expert < 0) break;
    const int block0 = int(ptx::load_shared_4(info.block()));
    const GemmParams& p = gemm(info);
    if constexpr (!std::is_same_v<Begin, Nothing>) {
      ptx::mbarrier_wait(s.empty + ring.at * 8, ring.parity ^ 1);
      begin(p, tile, block0, info, ring.at);
    }
    const int stages = stages_of<C>(p.k_blocks);
    for (int kb = 0; kb < stages; ++kb) {
      ahead(tile, kb);
      ptx::mbarrier_wait(s.empty + ring.at * 8, ring.parity ^ 1);
      f(p, tile, block0, info, kb, ring.at);
      ring.next();
    }
    // Otherwise the consumers answer for the loaders too: they end a tile only after its last stage has arrived.
    if (kEveryThreadArrives) ptx::mbarrier_arrive(s.info_empty + infos.at * 8);
    infos.next();
  }
}

template <typename C, typename Gemm, typename F>
__device__ __forceinline__ void for_each_stage(const Gemm& gemm, const Shared& s, F f) {
  for_each_stage<C>(gemm, s, f, Nothing());
}

// What the loader warp for the weights does, on one thread.
template <typename C, typename Gemm>
__device__ __forceinline__ void load_all_weights(const Gemm& gemm, const Shared& s) {
  const uint64_t once = ptx::policy_evict_first(), often = ptx::policy_evict_normal();
  for_each_stage<C>(
      gemm, s,
      [&](const GemmParams& p, const TokenTile& tile, int block0, const TileInfo<C>&, int kb, int stage) {
        load_weights<C>(p, s, tile, block0, kb, stage, p.evict_first ? once : often);
      },
      Nothing(),
      [&](const GemmParams& p, const TokenTile& tile, int block0, const TileInfo<C>& info, int stage) {
        load_row_factors<C>(p, s, tile, block0, info, stage);
      });
}

// What a loader warp for gathered tokens does, `warp` of kTokenWarps. source(p, tile, info, row of the tile): where the row starts, in units of 16
// bytes from x. before(info): of each tile. mma.sync reads tokens by the generic proxy that wrote them, so no proxy fence.
template <typename C, typename Gemm, typename Before, typename Source>
__device__ __forceinline__ void gather_all(const Gemm& gemm, const Shared& s, int warp, int lane, Before before, Source source) {
  static_assert(C::kMaxWidth <= C::kNarrow, "wgmma would read gathered tokens through the async proxy");
  constexpr int kChunks = kBlockK * 2 / 16;                        // 16-byte chunks of a row's stage
  constexpr int kRows = 32 / kChunks, kStep = kRows * C::kTokenWarps;  // rows a warp copies at a time, and all of them
  const int chunk = lane % kChunks, row0 = warp * kRows + lane / kChunks;
  const uint32_t place = s.tokens + (chunk / 8) * (C::kMaxWidth * 128);
  Ring<C::kStages> ring;
  Ring<C::kInfos> infos;
  while (true) {
    const TileInfo<C> info(s, infos.at);
    ptx::mbarrier_wait(s.info_full + infos.at * 8, infos.parity);
    const TokenTile tile = info.tile();
    if (tile.expert < 0) break;
    before(info);
    const GemmParams& p = gemm(info);
    uint32_t from[C::kMaxWidth / kStep];
#pragma unroll
    for (int i = 0; i < C::kMaxWidth / kStep; ++i)
      if (i * kStep < tile.count) from[i] = source(p, tile, info, row0 + i * kStep) + chunk;
    const uint4* x = static_cast<const uint4*>(p.x);
    for (int kb = 0; kb < p.k_blocks; ++kb) {
      const bool valid = kb * kBlockK + chunk * 8 < p.x_columns;
      ptx::mbarrier_wait(s.empty + ring.at * 8, ring.parity ^ 1);
      const uint32_t dst = place + ring.at * C::kTokenBytes;
#pragma unroll
      for (int i = 0; i < C::kMaxWidth / kStep; ++i) {
        const int r = row0 + i * kStep;
        if (r < tile.count) ptx::copy16(dst + r * 128 + ((chunk % 8 ^ (r & 7)) << 4), x + from[i] + (valid ? kb * kChunks : -chunk), valid);
      }
      ptx::copy16_arrive(s.full + ring.at * 8);
      ring.next();
    }
    // Otherwise the consumers answer for the loaders too: they end a tile only after its last stage has arrived.
    if (kEveryThreadArrives) ptx::mbarrier_arrive(s.info_empty + infos.at * 8);
    infos.next();
  }
  ptx::copy16_wait_all();                                          // no thread leaves with copies in flight
}

// What is behind the last column of a token where it ends within a chunk of K.
static __device__ const uint4 kZeros[kBlockK * 2 / 16] = {};

// The same where a token's part of a stage is one row of shared memory: a bulk copy a token. Each lane has one.
template <typename C, typename Gemm, typename Before, typename Source>
__device__ __forceinline__ void copy_rows(const Gemm& gemm, const Shared& s, int warp, int lane, Before before, Source source) {
  static_assert(C::kTokenRows && C::kMaxWidth <= 32 * C::kTokenWarps);
  constexpr int kBytes = kBlockK * 2;                              // of a chunk of K
  const int row = lane * C::kTokenWarps + warp;
  Ring<C::kStages> ring;
  Ring<C::kInfos> infos;
  while (true) {
    const TileInfo<C> info(s, infos.at);
    ptx::mbarrier_wait(s.info_full + infos.at * 8, infos.parity);
    const TokenTile tile = info.tile();
    if (tile.expert < 0) break;
    before(info);
    const GemmParams& p = gemm(info);
    const bool mine = row < tile.count;
    const uint32_t rows = max(0, (tile.count - warp + C::kTokenWarps - 1) / C::kTokenWarps);  // of this warp
    const uint8_t* from = static_cast<const uint8_t*>(p.x) + (mine ? size_t(source(p, tile, info, row)) * 16 : 0);
    const int stages = stages_of<C>(p.k_blocks);
    for (int step = 0; step < stages; ++step) {
      const uint32_t full = s.full + ring.at * 8, dst = s.tokens + ring.at * C::kTokenBytes + row * C::kTokenStride;
      const int bytes = chunks_of<C>(p.k_blocks, step) * kBytes, begin = step * C::kStageK * kBytes, there = min(bytes, p.x_columns * 2 - begin);
      ptx::mbarrier_wait(s.empty + ring.at * 8, ring.parity ^ 1);
      if (kEveryThreadArrives || lane == 0) ptx::mbarrier_arrive_expect_tx(full, lane == 0 ? rows * bytes : 0);
      __syncwarp();
      if (mine) {
        ptx::bulk_load(dst, from + begin, there, full);
        if (there < bytes) ptx::bulk_load(dst + there, kZeros, bytes - there, full);
      }
      ring.next();
    }
    // Otherwise the consumers answer for the loaders too: they end a tile only after its last stage has arrived.
    if (kEveryThreadArrives) ptx::mbarrier_arrive(s.info_empty + infos.at * 8);
    infos.next();
  }
}

// Tokens by the loader warps for them, however a tile without tensor copies has them.
template <typename C, typename Gemm, typename Before, typename Source>
__device__ __forceinline__ void copy_tokens(const Gemm& gemm, const Shared& s, int warp, int lane, Before before, Source source) {
  if constexpr (C::kTokenRows) copy_rows<C>(gemm, s, warp, lane, before, source);
  else gather_all<C>(gemm, s, warp, lane, before, source);
}

// Where a row of the down GEMM's tokens starts, in units of 16 bytes: they lie together.
struct RowsTogether {
  template <typename Info>
  __device__ __forceinline__ uint32_t operator()(const GemmParams& p, const TokenTile& tile, const Info&, int row) const {
    return uint32_t(tile.row + row) * uint32_t(p.x_stride / 8);
  }
};

// The loader warps: one for the weights, the others for the tokens. Weights are older than the kernel ahead (what writes them must not be a
// kernel that starts its dependents early), so where the tile list is too, they stream before that kernel has ended.
template <typename C, Stage S>
__device__ __forceinline__ void load(const GemmParams& p, const CUtensorMap* map, const Shared& s, int thread) {
  const int warp = thread / 32, lane = thread % 32;
  if (warp == 0) {
    if (lane == 0) load_all_weights<C>(OneGemm{p}, s);
  } else if constexpr (kGathers<C, S>) {
    ptx::grid_dependency_wait();
    copy_tokens<C>(OneGemm{p}, s, warp - 1, lane, Nothing(), [](const GemmParams&, const TokenTile&, const TileInfo<C>& info, int row) {
      return ptx::load_shared_4(info.slots() + row * 4);
    });
  } else if constexpr (C::kTokenRows) {
    ptx::grid_dependency_wait();
    copy_rows<C>(OneGemm{p}, s, warp - 1, lane, Nothing(), RowsTogether());
  } else if constexpr (C::kFp8) {
    static_assert(C::kTokenWarps == 2, "one for the tokens, one for their scales");
    if (warp == 1 && lane > 0) return;
    if (warp == 1) ptx::tensor_map_prefetch(map);
    ptx::grid_dependency_wait();
    if (warp == 1) {
      for_each_stage<C>(OneGemm{p}, s, [&](const GemmParams&, const TokenTile& tile, int, const TileInfo<C>&, int kb, int stage) {
        load_sorted_fp8<C>(map, s, tile, kb, stage);
      });
    } else {
      ScaleShare<C> share;
      for_each_stage<C>(
          OneGemm{p}, s,
          [&](const GemmParams&, const TokenTile& tile, int, const TileInfo<C>&, int, int stage) { share.publish(s, tile, stage, lane); },
          [&](const TokenTile& tile, int kb) { share.fetch(p, tile, kb, lane); });
    }
  } else {
    if (lane > 0) return;
    ptx::tensor_map_prefetch(map);                                 // or the first copy behind the wait would fetch it
    ptx::grid_dependency_wait();
    for_each_stage<C>(OneGemm{p}, s, [&](const GemmParams&, const TokenTile& tile, int, const TileInfo<C>&, int kb, int stage) {
      for (int half = warp - 1; half < 2; half += C::kTokenWarps) load_sorted<C>(map, s, tile, kb, half, stage);
    });
  }
}

}  // namespace vllm_humming::gemm
