// SPDX-License-Identifier: Apache-2.0
// The consumers' main loop for FP8 tokens: products of one stage (128 K, one token scale) are accumulated by the tensor cores, then scaled
// and added to the fp32 accumulators ("promoted").
#pragma once
#include "../mma/fp8.cuh"
#include "../mma/wgmma.cuh"
#include "tile.cuh"

namespace vllm_humming::gemm {

constexpr int kFp8Steps = kBlockK / 32;

// This thread's codes of one chunk, and the tables of its rows g and g + 8.
struct Fp8Chunk {
  uint4 half[2];  // two K steps each, of each the words of rows g and g + 8
  Fp8Table row[2];
  __device__ __forceinline__ void load(uint32_t chunk, int thread) {
    half[0] = ptx::load_shared_16(chunk + thread * 16);
    half[1] = ptx::load_shared_16(chunk + kCodeBytes / 2 + thread * 16);
    const uint32_t scales = chunk + kCodeBytes + (thread / 32 * 8 + thread % 32 / 4) * 8 + thread % 4;
    row[0].set(ptx::load_shared_1(scales));
    row[1].set(ptx::load_shared_1(scales + 4));
  }
  __device__ __forceinline__ void decode(uint32_t (&a)[kFp8Steps][4]) const {
#pragma unroll
    for (int step = 0; step < kFp8Steps; ++step) {
      const uint4& h = half[step / 2];
      row[0].decode(ptx::opaque(step % 2 ? h.z : h.x), a[step][0], a[step][2]);
      row[1].decode(ptx::opaque(step % 2 ? h.w : h.y), a[step][1], a[step][3]);
#pragma unroll
      for (int i = 0; i < 4; ++i) a[step][i] = ptx::opaque(a[step][i]);
    }
  }
};

// The scales of this thread's tokens, 8 j + 2 q and the next, of one stage and the N tokens from `scales` on (scale_place). Kept in registers:
// reading them costs shared memory's bandwidth, which the wgmmas need.
template <int N>
struct TokenScales {
  float at[N / 4] = {};
  __device__ __forceinline__ void load(uint32_t scales) {
    if constexpr (N % 16 == 0) {
#pragma unroll
      for (int i = 0; i < N / 4; i += 4) {
        const uint4 v = ptx::load_shared_16(scales + i * 4);
        at[i] = __uint_as_float(v.x), at[i + 1] = __uint_as_float(v.y), at[i + 2] = __uint_as_float(v.z), at[i + 3] = __uint_as_float(v.w);
      }
    } else {
#pragma unroll
      for (int i = 0; i < N / 4; i += 2) {
        const uint2 v = ptx::load_shared_8(scales + i * 4);
        at[i] = __uint_as_float(v.x), at[i + 1] = __uint_as_float(v.y);
      }
    }
  }
  // acc += part * scale. Accumulators of a thread: of each token pair, rows g (0, 1) and g + 8 (2, 3).
  template <int P>
  __device__ __forceinline__ void promote(float* acc, float (&part)[P]) const {
    static_assert(P == N / 2);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) asm volatile("" : "+f"(part[i])::"memory");  // nothing reads part above the wait
#pragma unroll
    for (int i = 0; i < N / 2; ++i) acc[i] = fmaf(part[i], at[i / 4 * 2 + i % 2], acc[i]);
  }
};

// The products of one block's stage with N tokens, as one group.
template <int N, int P>
__device__ __forceinline__ void issue(float (&part)[P], const uint32_t (&a)[kFp8Steps][4], uint32_t desc) {
  ptx::wgmma_fence();
  Wgmma<__nv_fp8_e4m3, N>::template mma<false>(part, a[0], desc);
#pragma unroll
  for (int step = 1; step < kFp8Steps; ++step) Wgmma<__nv_fp8_e4m3, N>::template mma<true>(part, a[step], desc + step * 2);
  ptx::wgmma_commit();
}

// One tile of width N. Its unit is the products of one block's stage with half of the tokens (where N is small: with all), issued together: while
// the tensor cores run one unit the one before is promoted and the next block's fragments are decoded. What stands between an issue and a wait
// for all of it the compiler moves behind the wait, so one unit stays in flight but at the end of a stage, when the other warpgroup has the
// tensor cores. Nothing is in flight at a branch: there the compiler neither keeps the operands nor lets accumulators be read.
template <typename C, int N>
__device__ __forceinline__ void multiply_fp8(const GemmParams& p, const Shared& s, Ring<C::kStages>& ring, int warpgroup,
                                             float (&acc)[C::kBlocks][C::kMaxWidth / 2]) {
  constexpr int kParts = N >= 48 ? 2 : 1, kTokens = N / kParts, kUnits = C::kBlocks * kParts;
  static_assert(C::kBlocks % 2 == 0, "fragments alternate over the blocks");
  static_assert(kTokens % 8 == 0);
  const int thread = ptx::opaque(threadIdx.x % 128), lane = thread % 32;
  const uint32_t weights = s.weights + warpgroup * C::kBlocks * C::kChunkBytes, scales = s.scales + lane % 4 * C::kMaxWidth;
  uint32_t a[2][kFp8Steps][4];
  float part[2][kTokens / 2] = {};  // defined, or the compiler counts it as live from the kernel's start
  TokenScales<kTokens> token_scales[kParts];
  Fp8Chunk next;
  ptx::mbarrier_wait(s.full + ring.at * 8, ring.parity);
  next.load(weights + ring.at * C::kWeightBytes, thread);
  next.decode(a[0]);
  for (int kb = 0; kb < p.k_blocks; ++kb) {
    const int stage = ring.at;
    const uint32_t desc = ptx::wgmma_descriptor(s.tokens + stage * C::kTokenBytes);
    ring.next();
    const bool last = kb + 1 == p.k_blocks;
    if (!last) ptx::mbarrier_wait(s.full + ring.at * 8, ring.parity);
    // Of block kBlocks: the next stage's first, after the last stage the same stage's again, for nothing.
    const auto load = [&](int block) {
      const uint32_t from = block < C::kBlocks ? stage * C::kWeightBytes + block * C::kChunkBytes : (last ? stage : ring.at) * C::kWeightBytes;
      next.load(weights + from, thread);
    };
    const auto issue_unit = [&](int u) {
      issue<kTokens>(part[u % 2], a[u / kParts % 2], desc + u % kParts * (kTokens * kBlockK / 16));
    };
#pragma unroll
    for (int i = 0; i < kParts; ++i) token_scales[i].load(scales + stage * C::kScaleBytes + i * kTokens);
    issue_unit(0);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int block = u / kParts;
      // Fragments that no unit in flight reads: with two parts the next block's at its first, else this one's behind the next one's issue.
      const bool decodes = kParts == 2 ? u % 2 == 0 : u + 2 == kUnits;
      if (u + 1 < kUnits) {
        if (kParts == 1) {
          load(block + 1);
          next.decode(a[(block + 1) % 2]);
        }
        issue_unit(u + 1);
        if (decodes) load(kParts == 2 ? block + 1 : C::kBlocks);
        ptx::wgmma_wait<1>();
      } else {
        ptx::wgmma_wait<0>();
        if (lane == 0) ptx::mbarrier_arrive(s.empty + stage * 8);
      }
      if (decodes) next.decode(a[kParts == 2 ? (block + 1) % 2 : 0]);
      token_scales[u % kParts].promote(acc[block] + u % kParts * (kTokens / 2), part[u % 2]);
    }
  }
}

}  // namespace vllm_humming::gemm
