// SPDX-License-Identifier: Apache-2.0
// The consumers' main loop for FP8 tokens: products of one stage (128 K, one token scale) are accumulated by the tensor cores, then scaled
// and added to the fp32 accumulators ("promoted").
#pragma once
#include "../mma/fp8.cuh"
#include "../mma/wgmma.cuh"
#include "tile.cuh"

namespace vllm_humming::gemm {

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
  // Stays where it is written, between an issue and its wait.
  __device__ __forceinline__ void decode(int step, uint32_t (&a)[4]) const {
    const uint4& h = half[step / 2];
    row[0].decode(ptx::opaque(step % 2 ? h.z : h.x), a[0], a[2]);
    row[1].decode(ptx::opaque(step % 2 ? h.w : h.y), a[1], a[3]);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = ptx::opaque(a[i]);
  }
};

// The scales of this thread's tokens, of one stage: 8 j + 2 q and the next. Reading them costs shared memory's bandwidth, which the wgmmas
// need: once a stage, not once a block.
template <int N>
struct TokenScales {
  uint2 pair[N / 8];
  __device__ __forceinline__ void load(uint32_t scales) {
#pragma unroll
    for (int j = 0; j < N / 8; ++j) pair[j] = ptx::load_shared_8(scales + j * 32);
  }
  // acc += part * scale. Accumulators of a thread: of each token pair, rows g (0, 1) and g + 8 (2, 3).
  template <int L, int P>
  __device__ __forceinline__ void promote(float (&acc)[L], const float (&part)[P]) const {
#pragma unroll
    for (int j = 0; j < N / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        acc[4 * j + i] = fmaf(part[4 * j + i], __uint_as_float(i % 2 ? pair[j].y : pair[j].x), acc[4 * j + i]);
  }
};

// One tile of width N. A stage's four steps (64 rows x 32 K) of a block are issued together; the next block's are decoded into other
// registers while the tensor cores run them. During a promotion the other warpgroup has the tensor cores. No branch lies between an issue
// and its wait: the compiler keeps a running wgmma's operands from being overwritten only within a basic block (build_tools/
// check_kernels.py looks).
template <typename C, int N>
__device__ __forceinline__ void multiply_fp8(const GemmParams& p, const Shared& s, Ring<C::kStages>& ring, int warpgroup,
                                             float (&acc)[C::kBlocks][C::kMaxWidth / 2]) {
  constexpr int kSteps = kBlockK / 32;
  static_assert(C::kBlocks % 2 == 0, "fragments alternate over the blocks");
  const int thread = ptx::opaque(threadIdx.x % 128), lane = thread % 32;
  const uint32_t weights = s.weights + warpgroup * C::kBlocks * C::kChunkBytes, scales = s.scales + lane % 4 * 8;
  uint32_t a[2][kSteps][4];
  TokenScales<N> token_scales;
  uint32_t release = 0;
  float part[N / 2] = {};  // defined, or the compiler counts it as live from the kernel's start
  Fp8Chunk next;
  ptx::mbarrier_wait(s.full + ring.at * 8, ring.parity);
  next.load(weights + ring.at * C::kWeightBytes, thread);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) next.decode(step, a[0][step]);
  for (int kb = 0; kb < p.k_blocks; ++kb) {
    const int stage = ring.at;
    const uint32_t desc = ptx::wgmma_descriptor(s.tokens + stage * C::kTokenBytes);
    ring.next();
#pragma unroll
    for (int b = 0; b < C::kBlocks; ++b) {
      if (b + 1 < C::kBlocks) {
        next.load(weights + stage * C::kWeightBytes + (b + 1) * C::kChunkBytes, thread);
      } else if (kb + 1 < p.k_blocks) {
        ptx::mbarrier_wait(s.full + ring.at * 8, ring.parity);
        next.load(weights + ring.at * C::kWeightBytes, thread);
      }
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (step == 0) Wgmma<__nv_fp8_e4m3, N>::template mma<false>(part, a[b % 2][step], desc);
        else Wgmma<__nv_fp8_e4m3, N>::template mma<true>(part, a[b % 2][step], desc + step * 2);
      }
      ptx::wgmma_commit();
      // The stage before: its scales have been used, since what they were used on is being overwritten.
      if (b == 0 && kb > 0 && lane == 0) ptx::mbarrier_arrive(release);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) next.decode(step, a[(b + 1) % 2][step]);
      if (b == 0) token_scales.load(scales + stage * C::kScaleBytes);
      ptx::wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < N / 2; ++i) asm volatile("" : "+f"(part[i])::"memory");  // nothing reads part above the wait
      token_scales.promote(acc[b], part);
    }
    release = s.empty + stage * 8;
  }
  __syncwarp();
  if (lane == 0) ptx::mbarrier_arrive(release);
}

}  // namespace vllm_humming::gemm
