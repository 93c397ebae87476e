// SPDX-License-Identifier: Apache-2.0
// A tile configuration and what follows from it: threads, shared memory, barriers.
#pragma once
#include "../mma/chunk.h"
#include "../ptx/ptx.cuh"
#include "params.h"

namespace vllm_humming {

// Token widths, ascending. Few wide ones: where the accumulators of all widths together exceed about 240 registers a thread, the
// compiler serializes every wgmma of the kernel (C7512), although only one width is live at a time.
template <int... Width>
struct Widths {
  static constexpr int kCount = sizeof...(Width);
  static constexpr int kAt[kCount] = {Width...};
  static constexpr int kMax = kAt[kCount - 1];
};

// How the up GEMM gets its tokens: gathered by row list (cp.async; TileConfig::kTokenRows: bulk copies), or from a sorted copy by tensor copies.
enum class Tokens { kGather, kSorted };

// SplitK: warpgroups that share their weight rows and take a stage's chunks of K in turns; they add up at the end of a tile (sum.cuh).
// StageK: chunks of K in a stage.
template <Format WeightFormat, int Warpgroups, int BlocksPerWarpgroup, typename TokenWidths, int Stages, int Ctas, int ProducerWarps,
          int Narrow, Tokens UpTokens, int SplitK = 1, int StageK = SplitK>
struct TileConfig {
  using W = TokenWidths;
  static constexpr Format kFormat = WeightFormat;
  static constexpr bool kFp8 = fp8_tokens(WeightFormat);
  static constexpr int kChunkBytes = chunk_bytes(WeightFormat);
  static constexpr int kWarpgroups = Warpgroups;
  static constexpr int kBlocks = BlocksPerWarpgroup;             // 64-row blocks of a warpgroup
  static constexpr int kSplitK = SplitK;
  static constexpr int kStageK = StageK;
  static_assert(Warpgroups % SplitK == 0 && StageK % SplitK == 0 && (StageK > 1) == (SplitK > 1));
  static constexpr int kRowGroups = Warpgroups / SplitK;         // warpgroup w: row group w / kSplitK, part w % kSplitK
  static constexpr int kTileBlocks = kRowGroups * BlocksPerWarpgroup;
  static constexpr int kTileRows = kTileBlocks * kBlockRows;
  static constexpr int kMaxWidth = W::kMax;
  static constexpr int kStages = Stages;
  static constexpr int kCluster = 1;                             // CTAs that run a tile together (pair/pair_tile.cuh)
  static constexpr int kCtas = Ctas;                             // CTAs an SM
  static constexpr int kNarrow = Narrow;                         // up to this width by mma.sync
  static constexpr Tokens kUpTokens = UpTokens;
  static constexpr int kBoxRows = kMaxWidth <= 32 ? 8 : kMaxWidth % 32 ? 16 : 32;  // token rows of one tensor copy: few large ones are fast
  static_assert(kMaxWidth % kBoxRows == 0, "a tensor copy would run past its half of the stage");
  static_assert(ProducerWarps == 3 || ProducerWarps == 4, "one warp for the weights, one or two for the tokens, the scheduler");
  static constexpr int kProducers = ProducerWarps * 32;
  static constexpr int kLoaders = kProducers - 32;               // the last producer warp is the scheduler
  static constexpr int kTokenWarps = ProducerWarps - 2;
  static constexpr int kConsumers = Warpgroups * 128;
  static constexpr int kThreads = kConsumers + kProducers;
  // Registers move from the producers to the consumers; setmaxnreg works on whole warpgroups and within the launch's total.
  static constexpr bool kSplitRegisters = ProducerWarps == 4;
  template <int Producer>
  static constexpr int kConsumerRegisters = (65536 / Ctas / kThreads / 8 * 8 * kThreads - Producer * 128) / kConsumers / 8 * 8;

  // Tokens of a stage. Where K is split a token's are one row, copied whole; + 16: rows start in different banks. Else [half of K][token], swizzled.
  static constexpr bool kTokenRows = SplitK > 1;
  static constexpr int kTokenStride = StageK * kBlockK * 2 + 16;  // of a row
  static constexpr int kTokenBytes = kTokenRows ? kMaxWidth * kTokenStride : kMaxWidth * kBlockK * token_bytes(WeightFormat);
  static constexpr int kWeightBytes = kTileBlocks * StageK * kChunkBytes;  // a stage: [block][chunk of K]
  static constexpr bool kScalesByThread = true;                  // see scale_place
  static constexpr int kScaleBytes = kFp8 ? (kMaxWidth * 4 + 127) / 128 * 128 : 0;     // token scales of a stage
  static constexpr int kStoreTokens = kMaxWidth <= (kFp8 ? 64 : 32) ? 8 : 16;  // tokens of one store chunk
  static constexpr int kStoreStride = kBlocks * kBlockRows * 2 + 16;  // + 16: rows start in different banks
  static constexpr int kStoreBytes = kStoreTokens * kStoreStride;     // two of them a warpgroup
  // Tile infos in flight. Two, so that a CTA takes a tile when it starts the one before; three would take them sooner and share them worse.
  static constexpr int kInfos = 2;
  static constexpr int kInfoBytes = 32 + kMaxWidth * 8 + kTileRows * 8;
  // Largest magnitudes of a store chunk's tokens, by warp: what the up GEMM's FP8 output is scaled by. Two of them.
  static constexpr int kAmaxBytes = kFp8 ? kStoreTokens * kWarpgroups * 4 * 4 : 0;
  static constexpr int kSumBytes = kBlocks * kMaxWidth / 2 * 4 * 128 * (SplitK - 1);  // sums of all parts but one, of a row group
  static constexpr bool kFused = !kFp8;                          // can run both GEMMs of a layer in one kernel: fused.cuh
  static constexpr bool kFusedGathers = kFused && kMaxWidth <= kNarrow;  // there, no tokens come by tensor copies
  static constexpr bool kFew = kFusedGathers;                    // layers of few entries run on these,
  static constexpr bool kFewApart = UpTokens == Tokens::kGather && SplitK == 1;  // and on these also with a kernel for each GEMM
  static constexpr int kFewBytes = kFew ? (3 * kMostFewEntries + 4) * 4 : 0;  // FewShared
  static constexpr int kBarriers = 2 * (Stages + kInfos) + (SplitK > 1 ? 3 * kRowGroups : 0);
  static constexpr int kSharedBytes = Stages * (kTokenBytes + kWeightBytes + kScaleBytes) + kWarpgroups * 2 * kStoreBytes + 2 * kAmaxBytes +
                                      kInfos * kInfoBytes + kFewBytes + kRowGroups * kSumBytes + kBarriers * 8;
};

namespace gemm {

// Barriers of the stages: full[i] and empty[i]; of the tile infos: info_full[j] and info_empty[j]; of a row group's sums: sum_full[2 r + turn % 2]
// and sum_empty[r].
struct Shared {
  uint32_t tokens, weights, scales, store, amax, sums, info, few, full, empty, info_full, info_empty, sum_full, sum_empty;  // shared-memory addresses
};

template <typename C>
__device__ __forceinline__ Shared carve(uint32_t base) {
  Shared s;
  if (base % 1024) __trap();                // the 128-byte swizzle repeats every 1024 bytes
  s.tokens = base;
  s.weights = s.tokens + C::kStages * C::kTokenBytes;
  s.scales = s.weights + C::kStages * C::kWeightBytes;
  s.store = s.scales + C::kStages * C::kScaleBytes;
  s.amax = s.store + C::kWarpgroups * 2 * C::kStoreBytes;
  s.sums = s.amax + 2 * C::kAmaxBytes;
  s.info = s.sums + C::kRowGroups * C::kSumBytes;
  s.few = s.info + C::kInfos * C::kInfoBytes;
  s.full = s.few + C::kFewBytes;
  s.empty = s.full + C::kStages * 8;
  s.info_full = s.empty + C::kStages * 8;
  s.info_empty = s.info_full + C::kInfos * 8;
  s.sum_full = s.info_empty + C::kInfos * 8;
  s.sum_empty = s.sum_full + C::kRowGroups * 16;
  return s;
}

// What the scheduler tells loaders and consumers of a tile.
template <typename C>
struct TileInfo {
  uint32_t at;  // shared-memory address
  __device__ __forceinline__ explicit TileInfo(const Shared& s, int buffer) : at(s.info + buffer * C::kInfoBytes) {}
  __device__ __forceinline__ TokenTile tile() const {                         // expert -1: no more tiles
    const uint4 v = ptx::load_shared_16(at);
    return {int(v.x), int(v.y), int(v.z), int(v.w)};
  }
  __device__ __forceinline__ uint32_t block() const { return at + 16; }       // first 64-row block of the tile
  // Fused kernels:
  __device__ __forceinline__ Stage stage() const { return Stage(ptx::load_shared_4(at + 20)); }
  __device__ __forceinline__ int token_tile() const { return ptx::load_shared_4(at + 24); }  // its number
  // int [width]: what the tile's users need of each row. A gathering loader: its token, in 16-byte units from x; the down GEMM's
  // epilogue: its slot.
  __device__ __forceinline__ uint32_t slots() const { return at + 32; }
  __device__ __forceinline__ uint32_t weights() const { return slots() + C::kMaxWidth * 4; }      // float [width]
  __device__ __forceinline__ uint32_t row_scale() const { return weights() + C::kMaxWidth * 4; }  // float [rows of the tile]
  __device__ __forceinline__ uint32_t bias() const { return row_scale() + C::kTileRows * 4; }     // float [rows of the tile]
};

// Where a token's scale lies among those of a stage: a thread's, tokens 8 j + 2 q and 8 j + 2 q + 1, lie together.
template <typename C>
__device__ __forceinline__ int scale_place(int token) {
  if constexpr (!C::kScalesByThread) return token;
  else return token % 8 / 2 * (C::kMaxWidth / 4) + token / 8 * 2 + token % 2;
}

// Stages that a tile's chunks of K take.
template <typename C>
__device__ __forceinline__ int stages_of(int k_blocks) {
  return (k_blocks + C::kStageK - 1) / C::kStageK;
}
// Chunks of K in its stage `step`.
template <typename C>
__device__ __forceinline__ int chunks_of(int k_blocks, int step) {
  return C::kStageK == 1 ? 1 : min(C::kStageK, k_blocks - step * C::kStageK);
}

// Position in a ring of N buffers and the parity of its barriers.
template <int N>
struct Ring {
  int at = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next() {
    if (++at == N) {
      at = 0;
      parity ^= 1;
    }
  }
};

// compute-sanitizer's racecheck does not follow what an elected lane's arrival orders after __syncwarp, nor a chain of two barriers: in a
// build with this macro every thread that writes or reads a tile info arrives on its own.
#ifdef VLLM_HUMMING_RACECHECK
constexpr bool kEveryThreadArrives = true;
#else
constexpr bool kEveryThreadArrives = false;
#endif

// Narrowest compiled width that holds `count` tokens.
template <typename C, int I = 0>
__device__ __forceinline__ int narrowest_width(int count) {
  constexpr int N = C::W::kAt[I];
  if constexpr (I + 1 < C::W::kCount) return count > N ? narrowest_width<C, I + 1>(count) : N;
  else return N;
}

template <typename C, Stage S>
constexpr bool kGathers = S == Stage::kUp && C::kUpTokens == Tokens::kGather;

}  // namespace gemm
}  // namespace vllm_humming
