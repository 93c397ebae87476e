// SPDX-License-Identifier: Apache-2.0
// A tile of FP8 tokens that a cluster of two CTAs works on: up to 256 tokens, 128 packed weight rows a CTA. Tokens are wgmma's M and come to
// both CTAs by one copy; weights are decoded to shared memory, once for all tokens of the tile.
#pragma once
#include "../../ptx/cluster.cuh"
#include "../tile.cuh"

namespace vllm_humming {

template <Format WeightFormat, typename TokenWidths, int Stages, int Decoded>
struct PairConfig {
  using W = TokenWidths;  // multiples of 64
  static constexpr Format kFormat = WeightFormat;
  static constexpr bool kFp8 = true;
  static_assert(fp8_tokens(WeightFormat));
  static constexpr int kCluster = 2;
  static constexpr int kStageK = 1;
  static constexpr bool kTokenRows = false;
  static constexpr int kChunkBytes = chunk_bytes(WeightFormat);
  static constexpr int kTileBlocks = 2;                          // 64-row blocks of a CTA
  static constexpr int kTileRows = kTileBlocks * kBlockRows;
  static constexpr int kMaxWidth = W::kMax;
  static constexpr int kBlocks = kMaxWidth / 128;                // most 64-token blocks of a warpgroup
  static constexpr int kStages = Stages;
  static constexpr int kDecoded = Decoded;                       // buffers of decoded weights
  static constexpr int kCtas = 1;
  static constexpr bool kFew = false, kFewApart = false, kFused = false;
  static constexpr Tokens kUpTokens = Tokens::kSorted;
  static constexpr int kBoxRows = 32;
  static constexpr bool kScalesByThread = false;                 // token scales of a stage in the tokens' order
  static constexpr int kConsumers = 256, kDecoders = 128, kProducers = 128;
  static constexpr int kThreads = kConsumers + kDecoders + kProducers;
  static constexpr int kConsumerRegisters = 216, kDecoderRegisters = 40, kProducerRegisters = 40;
  static_assert(kConsumers * kConsumerRegisters + kDecoders * kDecoderRegisters + kProducers * kProducerRegisters <= 65536);

  static constexpr int kTokenBytes = kMaxWidth * kBlockK;        // a stage
  static constexpr int kWeightBytes = kTileBlocks * kChunkBytes;
  static constexpr int kScaleBytes = kMaxWidth * 4;
  static constexpr int kDecodedBytes = kTileRows * kBlockK;
  static constexpr int kStoreStride = kBlockRows * 2 + 16;       // + 16: rows start in different banks
  static constexpr int kStoreBytes = 16 * kStoreStride;          // a consumer warp
  static constexpr int kInfos = 2;
  static constexpr int kInfoBytes = 32 + kMaxWidth * 8 + kTileRows * 8;
  static constexpr int kAmaxBytes = kBlocks * 16 * 4;            // a consumer warp
  static constexpr int kWarps = kConsumers / 32;
  static constexpr int kBarriers = 2 * (Stages + Decoded + kInfos + kWarps) + 2;
  static constexpr int kSharedBytes = Stages * (kTokenBytes + kWeightBytes + kScaleBytes) + Decoded * kDecodedBytes +
                                      kWarps * (kStoreBytes + kAmaxBytes) + kInfos * kInfoBytes + kBarriers * 8 + 16;
};

namespace gemm {

struct PairShared : Shared {
  uint32_t decoded, decoded_full, decoded_empty, amax_full, amax_empty;
  uint32_t next, next_full;  // int [2]: tiles that the first CTA's scheduler has taken for both, and their barriers
};

template <typename C>
__device__ __forceinline__ PairShared carve_pair(uint32_t base) {
  PairShared s;
  if (base % 1024) __trap();
  s.tokens = base;
  s.decoded = s.tokens + C::kStages * C::kTokenBytes;
  s.weights = s.decoded + C::kDecoded * C::kDecodedBytes;
  s.scales = s.weights + C::kStages * C::kWeightBytes;
  s.store = s.scales + C::kStages * C::kScaleBytes;
  s.amax = s.store + C::kWarps * C::kStoreBytes;
  s.info = s.amax + C::kWarps * C::kAmaxBytes;
  s.full = s.info + C::kInfos * C::kInfoBytes;
  s.empty = s.full + C::kStages * 8;
  s.decoded_full = s.empty + C::kStages * 8;
  s.decoded_empty = s.decoded_full + C::kDecoded * 8;
  s.info_full = s.decoded_empty + C::kDecoded * 8;
  s.info_empty = s.info_full + C::kInfos * 8;
  s.amax_full = s.info_empty + C::kInfos * 8;
  s.amax_empty = s.amax_full + C::kWarps * 8;
  s.next_full = s.amax_empty + C::kWarps * 8;
  s.next = s.next_full + 16;
  return s;
}

}  // namespace gemm
}  // namespace vllm_humming
