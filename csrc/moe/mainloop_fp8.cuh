// SPDX-License-Identifier: Apache-2.0
// The consumers' main loop for FP8 tokens: products of one stage (128 K, one token scale) are accumulated by the tensor cores, then scaled
// and added to the fp32 accumulators ("promoted").
#pragma once
#include "../mma/fp8.cuh"
#include "../mma/wgmma.cuh"
#include "tile.cuh"

namespace vllm_humming::gemm {

constexpr int kFp8Steps = kBlockK / 32;

// Addresses of this thread's codes and group scales in the stages' first chunk. Opaque, or the compiler works them out anew each time, a chain of
// instructions that nothing hides.
struct Fp8Fragment {
  uint32_t codes, scales;
  __device__ __forceinline__ Fp8Fragment(uint32_t weights, int thread)
      : codes(ptx::opaque(weights + thread * 16)),
        scales(ptx::opaque(weights + kCodeBytes + (thread / 32 * 8 + thread % 32 / 4) * 8 + thread % 4)) {}
};

// This thread's codes of one chunk, and the tables of its rows g and g + 8.
struct Fp8Chunk {
  uint4 half[2];  // two K steps each, of each the words of rows g and g + 8
  Fp8Table row[2];
  __device__ __forceinline__ void load(const Fp8Fragment& at, uint32_t chunk) {
    row[0].set(ptx::load_shared_1(at.scales + chunk));
    row[1].set(ptx::load_shared_1(at.scales + chunk + 4));
    half[0] = ptx::load_shared_16(at.codes + chunk);
    half[1] = ptx::load_shared_16(at.codes + chunk + kCodeBytes / 2);
  }
  // One step's fragment.
  __device__ __forceinline__ void decode(int step, uint32_t (&a)[4]) const {
    const uint4& h = half[step / 2];
    row[0].decode(ptx::opaque(step % 2 ? h.z : h.x), a[0], a[2]);
    row[1].decode(ptx::opaque(step % 2 ? h.w : h.y), a[1], a[3]);
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

// One tile of width N. The unit is one step, 64 rows x 32 K, decoded into one of two sets of registers while the tensor cores run the unit before:
// it has to wait for the unit that used the set. (Whatever merely stands between an issue and a wait, ptxas moves to where it likes.) Shared
// memory is read between the wait for a block's products and the next issue: behind a wgmma's own reads it comes late. During a promotion the
// other warpgroup has the tensor cores. Nothing is in flight at a branch: there the compiler does not keep a running wgmma's operands from
// being overwritten (build_tools/check_kernels.py looks).
template <typename C, int N>
__device__ __forceinline__ void multiply_fp8(int k_blocks, const Shared& s, Ring<C::kStages>& ring, int warpgroup,
                                             float (&acc)[C::kBlocks][C::kMaxWidth / 2]) {
  static_assert(C::kBlocks == 2, "a stage is released once the first promotion has read its token scales");
  const int thread = ptx::opaque(threadIdx.x % 128), lane = thread % 32;
  const Fp8Fragment at(s.weights + warpgroup * C::kBlocks * C::kChunkBytes, thread);
  const uint32_t scales = s.scales + lane % 4 * C::kMaxWidth;
  uint32_t a[2][4];
  TokenScales<N> token_scales;
  float part[N / 2] = {};  // defined, or the compiler counts it as live from the kernel's start
  Fp8Chunk chunk;
  ptx::mbarrier_wait(s.full + ring.at * 8, ring.parity);
  chunk.load(at, ring.at * C::kWeightBytes);
  token_scales.load(scales + ring.at * C::kScaleBytes);
  for (int kb = 0; kb < k_blocks; ++kb) {
    const int stage = ring.at;
    const uint32_t desc = ptx::wgmma_descriptor(s.tokens + stage * C::kTokenBytes);
    ring.next();
#pragma unroll
    for (int b = 0; b < C::kBlocks; ++b) {
#pragma unroll
      for (int step = 0; step < kFp8Steps; ++step) {
        chunk.decode(step, a[step % 2]);
        ptx::wgmma_fence();
        if (step == 0) Wgmma<__nv_fp8_e4m3, N>::template mma<false>(part, a[step % 2], desc);
        else Wgmma<__nv_fp8_e4m3, N>::template mma<true>(part, a[step % 2], desc + step * 2);
        ptx::wgmma_commit();
        if (step > 0 && step + 1 < kFp8Steps) ptx::wgmma_wait<1>();
      }
      if (b + 1 < C::kBlocks) {
        ptx::wgmma_wait<0>();
        chunk.load(at, stage * C::kWeightBytes + (b + 1) * C::kChunkBytes);
        token_scales.promote(acc[b], part);
      } else {
        const uint32_t ready = ptx::mbarrier_ready(s.full + ring.at * 8, ring.parity);
        ptx::wgmma_wait<0>();
        if (lane == 0) ptx::mbarrier_arrive(s.empty + stage * 8);
        token_scales.promote(acc[b], part);
        if (kb + 1 < k_blocks) {
          ptx::mbarrier_wait_unless(ready, s.full + ring.at * 8, ring.parity);
          chunk.load(at, ring.at * C::kWeightBytes);
          token_scales.load(scales + ring.at * C::kScaleBytes);
        }
      }
    }
  }
}

}  // namespace vllm_humming::gemm
