// SPDX-License-Identifier: Apache-2.0
// FP4 weights to wgmma A fragments in registers. Bit layout: docs/kernel-notes.md, "Packed weights".
#pragma once
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "../ptx/ptx.cuh"
#include "chunk.h"

namespace vllm_humming {

template <typename T>
struct Fp4;

template <>
struct Fp4<__nv_bfloat16> {
  static constexpr int kExponentShift = 7;
  // Four fragments of e2m1 * 2^-126, exact (0.5 is a bf16 subnormal).
  // The multiplication shifts bits by 0, 5 and 11 at once: a lane's 3, 4, 6, 7 become 8, 15, 6, 7; what else it makes carries into none of these.
  static __device__ __forceinline__ void expand(uint32_t w, uint32_t (&a)[4]) {
    constexpr uint32_t kBits = 0x81C081C0;
    a[0] = w & kBits;
    a[1] = (w << 3) & kBits;
    a[2] = (w << 6) & kBits;
    a[3] = (((w >> 7) & 0x00D800D8) * (1 + (1 << 5) + (1 << 11))) & kBits;
  }
  static __device__ __forceinline__ uint32_t scale(uint32_t a, uint32_t factor) {
    uint32_t d;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(factor));
    return d;
  }
};

template <>
struct Fp4<__half> {
  static constexpr int kExponentShift = 10;
  // Four fragments of e2m1 * 2^-14, exact.
  // The multiplications shift magnitude and sign at once; what else they make carries into none of kBits.
  static __device__ __forceinline__ void expand(uint32_t w, uint32_t (&a)[4]) {
    constexpr uint32_t kBits = 0x8E008E00;
    a[0] = w & kBits;
    a[1] = (w << 3) & kBits;
    a[2] = ((w & 0x40384038) * ((1 << 6) + (1 << 1))) & kBits;
    a[3] = ((w & 0x20072007) * ((1 << 9) + (1 << 2))) & kBits;
  }
  static __device__ __forceinline__ uint32_t scale(uint32_t a, uint32_t factor) {
    uint32_t d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(factor));
    return d;
  }
};

// Scale bytes of a thread's two rows (g and g + 8) in a chunk, and the factors they stand for.
template <Format F>
struct Scales;

template <>
struct Scales<Format::kMxfp4> {
  static constexpr int kBytes = 8;                 // four groups of 32 a row
  static constexpr int kSteps = 2;                 // K steps that share a factor
  uint2 bytes;
  __device__ __forceinline__ void load(uint32_t a) { bytes = ptx::load_shared_8(a); }
  // A byte is the factor's exponent field.
  template <typename T>
  __device__ __forceinline__ uint32_t factor(int half, int step) const {
    const uint32_t word = half ? bytes.y : bytes.x;
    const int group = step / 2;
    return ptx::repeat_half(((group % 2 ? word >> 8 : word) & 0x00FF00FFu) << Fp4<T>::kExponentShift, group / 2);
  }
};

template <>
struct Scales<Format::kNvfp4> {
  static constexpr int kBytes = 16;                // eight groups of 16 a row
  static constexpr int kSteps = 1;
  uint4 bytes;
  __device__ __forceinline__ void load(uint32_t a) { bytes = ptx::load_shared_16(a); }
  // A byte is the low five bits of the factor's exponent and three of its mantissa; in bf16 the exponent's other bits are set.
  template <typename T>
  __device__ __forceinline__ uint32_t factor(int half, int step) const {
    constexpr int kShift = Fp4<T>::kExponentShift - 3;
    constexpr uint32_t kMask = 0x00FF00FFu << kShift, kSet = kShift == 4 ? 0x70007000u : 0u;
    const uint32_t word = half ? (step < 4 ? bytes.z : bytes.w) : (step < 4 ? bytes.x : bytes.y);
    return ptx::repeat_half(((step % 2 ? word >> (8 - kShift) : word << kShift) & kMask) | kSet, step % 4 / 2);
  }
};

// One K step (16) of a 64-row block: `word` holds this thread's eight codes.
template <typename T>
__device__ __forceinline__ void decode(uint32_t word, uint32_t factor_low, uint32_t factor_high, uint32_t (&a)[4]) {
  Fp4<T>::expand(word, a);
  a[0] = Fp4<T>::scale(a[0], factor_low);
  a[1] = Fp4<T>::scale(a[1], factor_high);
  a[2] = Fp4<T>::scale(a[2], factor_low);
  a[3] = Fp4<T>::scale(a[3], factor_high);
}

}  // namespace vllm_humming
