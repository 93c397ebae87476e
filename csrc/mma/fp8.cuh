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
  __device__ __forceinline__ void set(uint32_t scale) {
    low = scale * 0x01010100u + 0x14100800u;
    high = scale * 0x01010101u + 0x24201C18u;
  }
  // The bytes that the low four nibbles name. Not __byte_perm: the compiler would know which bits count, and mask each half anew.
  __device__ __forceinline__ uint32_t select(uint32_t nibbles) const {
    uint32_t d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(low), "r"(high), "r"(nibbles));
    return d;
  }
  // The eight codes of a word: the row's four bytes of the step's first and second 16 K.
  __device__ __forceinline__ void decode(uint32_t word, uint32_t& first, uint32_t& second) const {
    constexpr uint32_t kSign = 0x80808080u;
    const uint32_t magnitudes = word & 0x77777777u;
    first = select(magnitudes) | (word & kSign);
    second = select(magnitudes >> 16) | ((word << 4) & kSign);
  }
};

// Where K index k of a group of 128 lies in FP8 tokens: so that the weights that a thread holds of a row share one group scale (K 32 q ..
// 32 q + 31 for lane % 4 = q), and each of its words is eight consecutive K. The MMA sums over K in any order.
__host__ __device__ constexpr int fp8_place(int k) { return k / 8 % 4 * 32 + k / 4 % 2 * 16 + k / 32 * 4 + k % 4; }

}  // namespace vllm_humming
