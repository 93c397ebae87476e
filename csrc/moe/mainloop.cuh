// SPDX-License-Identifier: Apache-2.0
// The consumers' main loop: weights from shared memory to registers, decoded, multiplied with the tokens of the stage.
#pragma once
#include "../mma/fp4.cuh"
#include "../mma/mma_sync.cuh"
#include "../mma/wgmma.cuh"
#include "tile.cuh"

namespace vllm_humming::gemm {

// Addresses of this thread's codes and group scales within a chunk.
template <typename C>
struct Fragment {
  uint32_t codes, scales;
  __device__ __forceinline__ explicit Fragment(int thread)
      : codes(thread * 16), scales(kCodeBytes + (thread / 32 * 8 + thread % 32 / 4) * Scales<C::kFormat>::kBytes) {}
};

__device__ __forceinline__ uint32_t word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// A stage's group scales and the codes of its two K halves in registers, read ahead of their use.
template <typename C>
struct Codes {
  Scales<C::kFormat> scales[C::kBlocks];
  uint4 half[2][C::kBlocks];
  __device__ __forceinline__ void load_half(uint32_t w, const Fragment<C>& at, int h) {
#pragma unroll
    for (int b = 0; b < C::kBlocks; ++b) half[h][b] = ptx::load_shared_16(w + b * C::kChunkBytes + h * (kCodeBytes / 2) + at.codes);
  }
  __device__ __forceinline__ void load_scales(uint32_t w, const Fragment<C>& at) {
#pragma unroll
    for (int b = 0; b < C::kBlocks; ++b) scales[b].load(w + b * C::kChunkBytes + at.scales);
  }
};

// One tile of width N: acc[block][.. N / 2] = W * X^T over all K, by wgmma. The unit is one wgmma (64 rows x 16 K): issuing one blocks
// the warp until the tensor cores take it, so the next unit is decoded after each, not after a batch of them. Codes are read half a
// stage ahead, the next stage's first half included: waiting for them where they are used cost a tenth of the time.
template <typename T, typename C, int N>
__device__ __forceinline__ void multiply_wide(int k_blocks, const Shared& s, Ring<C::kStages>& ring, int warpgroup,
                                              float (&acc)[C::kBlocks][C::kMaxWidth / 2]) {
  static_assert(C::kSplitK == 1);
  const int thread = ptx::opaque(threadIdx.x % 128), lane = thread % 32;
  const Fragment<C> at(thread);
  const uint32_t weights = s.weights + warpgroup * C::kBlocks * C::kChunkBytes;
  uint32_t a[2][4];
  uint32_t release = 0;
  Codes<C> codes;
  ptx::mbarrier_wait(s.full + ring.at * 8, ring.parity);
  codes.load_scales(weights + ring.at * C::kWeightBytes, at);
  codes.load_half(weights + ring.at * C::kWeightBytes, at, 0);
  for (int kb = 0; kb < k_blocks; ++kb) {
    const uint32_t desc = ptx::wgmma_descriptor(s.tokens + ring.at * C::kTokenBytes);
    const int stage = ring.at;
    ring.next();
    Scales<C::kFormat> scales[C::kBlocks];
#pragma unroll
    for (int b = 0; b < C::kBlocks; ++b) scales[b] = codes.scales[b];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (h == 0) {
        codes.load_half(weights + stage * C::kWeightBytes, at, 1);
      } else if (kb + 1 < k_blocks) {
        ptx::mbarrier_wait(s.full + ring.at * 8, ring.parity);
        codes.load_scales(weights + ring.at * C::kWeightBytes, at);
        codes.load_half(weights + ring.at * C::kWeightBytes, at, 0);
      }
      uint32_t low[C::kBlocks], high[C::kBlocks];
#pragma unroll
      for (int unit = 0; unit < 4 * C::kBlocks; ++unit) {
        const int step = unit / C::kBlocks, b = unit % C::kBlocks;
        uint32_t(&fragment)[4] = a[unit % 2];
        if (step % Scales<C::kFormat>::kSteps == 0) {
          low[b] = scales[b].template factor<T>(0, h * 4 + step);
          high[b] = scales[b].template factor<T>(1, h * 4 + step);
        }
        // opaque: decoded no earlier than here, after the wait of the unit before; until then fragment's registers are being read
        decode<T>(ptx::opaque(word_of(codes.half[h][b], step)), low[b], high[b], fragment);
        ptx::wgmma_fence();
        Wgmma<T, N>::mma(acc[b], fragment, desc + (h * (C::kMaxWidth * 128) + step * 32) / 16);
        ptx::wgmma_commit();
        ptx::wgmma_wait<1>();  // the unit before is done: its fragment is free, and after the first unit so is the stage before
        if (h == 0 && unit == 0 && kb > 0 && lane == 0) ptx::mbarrier_arrive(release);
      }
    }
    release = s.empty + stage * 8;
  }
  ptx::wgmma_wait<0>();  // the epilogue's first use of acc needs a later, volatile load, so none moves above this
  if (lane == 0) ptx::mbarrier_arrive(release);
}

// The same by mma.sync, for narrow tiles, whose time is the decoding.
template <typename T, typename C, int N>
__device__ __forceinline__ void multiply_narrow(int k_blocks, const Shared& s, Ring<C::kStages>& ring, int warpgroup,
                                                float (&acc)[C::kBlocks][C::kMaxWidth / 2]) {
  const int thread = ptx::opaque(threadIdx.x % 128), lane = thread % 32;
  const Fragment<C> at(thread);
  constexpr int kBlockBytes = C::kStageK * C::kChunkBytes, kStepBytes = C::kSplitK * C::kChunkBytes;
  const int part = warpgroup % C::kSplitK, stages = stages_of<C>(k_blocks);
  const uint32_t weights = s.weights + warpgroup / C::kSplitK * C::kBlocks * kBlockBytes + part * C::kChunkBytes;
  // ldmatrix: tile lane / 8 is K chunk (lane / 8) of 8 tokens; the swizzle of row r is r % 8 = lane % 8.
  const uint32_t chunk = lane / 8, swizzle = lane % 8;
  const uint32_t row = C::kTokenRows ? lane % 8 * C::kTokenStride + part * (kBlockK * 2) + chunk * 16 : lane % 8 * 128;
  auto multiply_chunk = [&](uint32_t w, uint32_t x) {
    Scales<C::kFormat> scales[C::kBlocks];
    uint4 codes[C::kBlocks];
#pragma unroll
    for (int b = 0; b < C::kBlocks; ++b) scales[b].load(w + b * kBlockBytes + at.scales);
#pragma unroll
    for (int group = 0; group < kBlockK / 32; ++group) {
      uint4 tokens[N / 8];
#pragma unroll
      for (int j = 0; j < N / 8; ++j)
        tokens[j] = ptx::load_matrix_4(C::kTokenRows ? x + j * 8 * C::kTokenStride + group * 64
                                                     : x + group / 2 * (C::kMaxWidth * 128) + j * 1024 + (((group % 2 * 4 + chunk) ^ swizzle) << 4));
#pragma unroll
      for (int b = 0; b < C::kBlocks; ++b) {
        if (group % 2 == 0) codes[b] = ptx::load_shared_16(w + b * kBlockBytes + (group / 2) * (kCodeBytes / 2) + at.codes);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int step = group * 2 + i;
          uint32_t a[4];
          decode<T>(word_of(codes[b], step % 4), scales[b].template factor<T>(0, step), scales[b].template factor<T>(1, step), a);
#pragma unroll
          for (int j = 0; j < N / 8; ++j)
            mma_sync(acc[b] + 4 * j, a, i ? tokens[j].z : tokens[j].x, i ? tokens[j].w : tokens[j].y, T());
        }
      }
    }
  };
  uint32_t release = 0;
  for (int step = 0; step < stages; ++step) {
    // The stage before, here and not behind its products: within their basic block the compiler moves the arrival up to reads that are issued
    // but queue behind another CTA's global loads; it overtakes them, and the next copy overwrites what they were to read.
    __syncwarp();
    if (step > 0 && lane == 0) ptx::mbarrier_arrive(release);
    ptx::mbarrier_wait(s.full + ring.at * 8, ring.parity);
    uint32_t w = weights + ring.at * C::kWeightBytes, x = s.tokens + ring.at * C::kTokenBytes + row;
    if constexpr (C::kStageK == 1) {
      multiply_chunk(w, x);
    } else {
      const int chunks = chunks_of<C>(k_blocks, step);
#pragma unroll 1
      for (int i = part; i < chunks; i += C::kSplitK, w += kStepBytes, x += C::kSplitK * kBlockK * 2) multiply_chunk(w, x);
    }
    release = s.empty + ring.at * 8;
    ring.next();
  }
  __syncwarp();
  if (lane == 0) ptx::mbarrier_arrive(release);
}

// A warpgroup past the last weight row: keeps the ring turning and leaves the tensor cores to the others.
template <typename C>
__device__ __forceinline__ void skip_stages(int stages, const Shared& s, Ring<C::kStages>& ring) {
#pragma unroll 1
  for (int i = 0; i < stages; ++i) {
    ptx::mbarrier_wait(s.full + ring.at * 8, ring.parity);
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(s.empty + ring.at * 8);
    ring.next();
  }
}

}  // namespace vllm_humming::gemm
