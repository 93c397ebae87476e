// SPDX-License-Identifier: Apache-2.0
// The consumers' main loop for FP8 tokens: products of one stage (128 K, one token scale) are accumulated by the tensor cores, then scaled
// and added to the fp32 accumulators ("promoted").
#pragma once
#include "../mma/fp8.cuh"
#include "../mma/wgmma.cuh"
#include "tile.cuh"

namespace vllm_humming::gemm {

// This thread's codes and group scales of one chunk.
struct Fp8Codes {
  uint4 half[2];  // 64 K each: two K steps, of each the words of rows g and g + 8
  uint2 scales;
  __device__ __forceinline__ void load(uint32_t chunk, int thread) {
    half[0] = ptx::load_shared_16(chunk + thread * 16);
    half[1] = ptx::load_shared_16(chunk + kCodeBytes / 2 + thread * 16);
    scales = ptx::load_shared_8(chunk + kCodeBytes + (thread / 32 * 8 + thread % 32 / 4) * 8);
  }
  __device__ __forceinline__ void decode(int step, uint32_t (&a)[4]) const {
    const uint4& h = half[step / 2];
    if (step % 2 == 0) decode_fp8(h.x, h.y, scales, step, a);
    else decode_fp8(h.z, h.w, scales, step, a);
  }
};

// acc += part * (the tokens' scales). Accumulators of a thread: token 8 j + 2 q + c of rows g (0, 1) and g + 8 (2, 3).
template <int N, int L, int P>
__device__ __forceinline__ void promote(float (&acc)[L], const float (&part)[P], uint32_t scales) {
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    const uint2 w = ptx::load_shared_8(scales + j * 32);
    const float scale[2] = {__uint_as_float(w.x), __uint_as_float(w.y)};
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[4 * j + i] = fmaf(part[4 * j + i], scale[i % 2], acc[4 * j + i]);
  }
}

// One tile of width N. A step (64 rows x 32 K) is decoded while the tensor cores run the one before; the first of the next block before
// the wait for this block's last. The other warpgroup's products fill the tensor cores during a promotion.
template <typename C, int N>
__device__ __forceinline__ void multiply_fp8_wide(const GemmParams& p, const Shared& s, Ring<C::kStages>& ring, int warpgroup,
                                                  float (&acc)[C::kBlocks][C::kMaxWidth / 2]) {
  constexpr int kSteps = kBlockK / 32;
  const int thread = ptx::opaque(threadIdx.x % 128), lane = thread % 32;
  const uint32_t weights = s.weights + warpgroup * C::kBlocks * C::kChunkBytes, scales = s.scales + lane % 4 * 8;
  uint32_t a[2][4];
  float part[N / 2] = {};  // defined, or the compiler counts it as live from the kernel's start
  Fp8Codes codes, next;
  ptx::mbarrier_wait(s.full + ring.at * 8, ring.parity);
  next.load(weights + ring.at * C::kWeightBytes, thread);
  next.decode(0, a[0]);
  for (int kb = 0; kb < p.k_blocks; ++kb) {
    const int stage = ring.at;
    const uint32_t desc = ptx::wgmma_descriptor(s.tokens + stage * C::kTokenBytes);
    ring.next();
#pragma unroll
    for (int b = 0; b < C::kBlocks; ++b) {
      codes = next;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        ptx::wgmma_fence();
        if (step == 0) Wgmma<__nv_fp8_e4m3, N>::template mma<false>(part, a[0], desc);
        else Wgmma<__nv_fp8_e4m3, N>::template mma<true>(part, a[step % 2], desc + step * 2);
        ptx::wgmma_commit();
        if (step == 1) {
          if (b + 1 < C::kBlocks) {
            next.load(weights + stage * C::kWeightBytes + (b + 1) * C::kChunkBytes, thread);
          } else if (kb + 1 < p.k_blocks) {
            ptx::mbarrier_wait(s.full + ring.at * 8, ring.parity);
            next.load(weights + ring.at * C::kWeightBytes, thread);
          }
        }
        ptx::wgmma_wait<1>();  // the step before is done: its fragment is free
        if (step + 1 < kSteps) codes.decode(step + 1, a[(step + 1) % 2]);
        else next.decode(0, a[0]);
      }
      ptx::wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < N / 2; ++i) asm volatile("" : "+f"(part[i])::"memory");  // nothing reads part above the wait
      promote<N>(acc[b], part, scales + stage * C::kScaleBytes);
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(s.empty + stage * 8);
  }
}

// The same by mma.sync, for narrow tiles, whose time is the memory's.
template <typename C, int N>
__device__ __forceinline__ void multiply_fp8_narrow(const GemmParams& p, const Shared& s, Ring<C::kStages>& ring, int warpgroup,
                                                    float (&acc)[C::kBlocks][C::kMaxWidth / 2]) {
  const int thread = ptx::opaque(threadIdx.x % 128), lane = thread % 32;
  // ldmatrix: tile lane / 8 is the 16-byte K chunk lane / 8 of 8 tokens; the swizzle of row r is r % 8 = lane % 8.
  const uint32_t row = lane % 8 * kBlockK, chunk = lane / 8, swizzle = lane % 8;
  for (int kb = 0; kb < p.k_blocks; ++kb) {
    ptx::mbarrier_wait(s.full + ring.at * 8, ring.parity);
    const uint32_t w = s.weights + ring.at * C::kWeightBytes + warpgroup * C::kBlocks * C::kChunkBytes;
    const uint32_t x = s.tokens + ring.at * C::kTokenBytes + row;
    float part[C::kBlocks][N / 2] = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint4 tokens[N / 8];
#pragma unroll
      for (int j = 0; j < N / 8; ++j) tokens[j] = ptx::load_matrix_4(x + j * 8 * kBlockK + (((h * 4 + chunk) ^ swizzle) << 4));
#pragma unroll
      for (int b = 0; b < C::kBlocks; ++b) {
        const uint32_t at = w + b * C::kChunkBytes;
        const uint4 codes = ptx::load_shared_16(at + h * (kCodeBytes / 2) + thread * 16);
        const uint2 scales = ptx::load_shared_8(at + kCodeBytes + (thread / 32 * 8 + lane / 4) * 8);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t a[4];
          decode_fp8(i ? codes.z : codes.x, i ? codes.w : codes.y, scales, h * 2 + i, a);
#pragma unroll
          for (int j = 0; j < N / 8; ++j) mma_sync_fp8(part[b] + 4 * j, a, i ? tokens[j].z : tokens[j].x, i ? tokens[j].w : tokens[j].y);
        }
      }
    }
#pragma unroll
    for (int b = 0; b < C::kBlocks; ++b) promote<N>(acc[b], part[b], s.scales + ring.at * C::kScaleBytes + lane % 4 * 8);
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(s.empty + ring.at * 8);
    ring.next();
  }
}

}  // namespace vllm_humming::gemm
