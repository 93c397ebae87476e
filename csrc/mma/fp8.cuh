// SPDX-License-Identifier: Apache-2.0
// FP4 weights to e4m3 A fragments in registers, the group scale folded into the exponent. Bit layout: docs/kernel-notes.md, "Packed
// weights".
#pragma once
#include <cstdint>
#include "../ptx/ptx.cuh"

namespace vllm_humming {

// The e4m3 bytes of the eight e2m1 magnitudes times 2^d, as PRMT's two operands. `scale`: the packed byte, 8 * (d + 5).
struct Fp8Table {
  uint32_t low, high;
  __device__ __forceinline__ explicit Fp8Table(uint32_t scale)
      : low(scale * 0x01010100u + 0x14100800u), high(scale * 0x01010101u + 0x24201C18u) {}
  // The eight codes of a word: K 4q .. 4q + 3 of the step, and K 16 + 4q ...
  __device__ __forceinline__ void decode(uint32_t word, uint32_t& a_low, uint32_t& a_high) const {
    constexpr uint32_t kSign = 0x80808080u;
    const uint32_t magnitudes = word & 0x77777777u;
    a_low = __byte_perm(low, high, magnitudes) | (word & kSign);
    a_high = __byte_perm(low, high, magnitudes >> 16) | ((word << 4) & kSign);
  }
};

// Byte i of a word, zero-extended.
__device__ __forceinline__ uint32_t byte_of(uint32_t word, int i) { return __byte_perm(word, 0, 0x4440 + i); }

// One K step (32) of a 64-row block. word_low, word_high: this thread's codes of rows g and g + 8; scales: the two rows' four bytes.
__device__ __forceinline__ void decode_fp8(uint32_t word_low, uint32_t word_high, const uint2& scales, int step, uint32_t (&a)[4]) {
  Fp8Table(byte_of(scales.x, step)).decode(word_low, a[0], a[2]);
  Fp8Table(byte_of(scales.y, step)).decode(word_high, a[1], a[3]);
}

// D[16 x 8] += A[16 x 32] * B[32 x 8].
__device__ __forceinline__ void mma_sync_fp8(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace vllm_humming
