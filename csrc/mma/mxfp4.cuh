// SPDX-License-Identifier: Apache-2.0
// MXFP4 weights to wgmma A fragments in registers. Bit layout: docs/kernel-notes.md, "Packed weights".
#pragma once
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "chunk.h"

namespace vllm_humming {

template <typename T>
struct Mxfp4;

template <>
struct Mxfp4<__nv_bfloat16> {
  static constexpr int kFactorShift = 7;
  // Four fragments of e2m1 * 2^-126, exact (0.5 is a bf16 subnormal).
  static __device__ __forceinline__ void expand(uint32_t w, uint32_t (&a)[4]) {
    constexpr uint32_t kMagnitude = 0x01C001C0, kSign = 0x80008000;
    a[0] = w & (kMagnitude | kSign);
    a[1] = (w << 3) & (kMagnitude | kSign);
    a[2] = ((w << 6) & kMagnitude) | ((w << 1) & kSign);
    a[3] = ((w >> 3) & kMagnitude) | ((w << 2) & kSign);
  }
  static __device__ __forceinline__ uint32_t scale(uint32_t a, uint32_t factor) {
    uint32_t d;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(factor));
    return d;
  }
};

template <>
struct Mxfp4<__half> {
  static constexpr int kFactorShift = 10;
  // Four fragments of e2m1 * 2^-14, exact.
  static __device__ __forceinline__ void expand(uint32_t w, uint32_t (&a)[4]) {
    constexpr uint32_t kMagnitude = 0x0E000E00, kSign = 0x80008000;
    a[0] = w & (kMagnitude | kSign);
    a[1] = (w << 3) & (kMagnitude | kSign);
    a[2] = ((w << 6) & kMagnitude) | ((w << 1) & kSign);
    a[3] = ((w << 9) & kMagnitude) | ((w << 2) & kSign);
  }
  static __device__ __forceinline__ uint32_t scale(uint32_t a, uint32_t factor) {
    uint32_t d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(factor));
    return d;
  }
};

// The four group factors of a row as two registers of two: groups 0 and 2, groups 1 and 3.
template <typename T>
struct GroupFactors {
  uint32_t even, odd;
  __device__ __forceinline__ explicit GroupFactors(uint32_t bytes)
      : even((bytes & 0x00FF00FF) << Mxfp4<T>::kFactorShift), odd((bytes >> 8 & 0x00FF00FF) << Mxfp4<T>::kFactorShift) {}
  // A pair of equal factors; the compiler folds it into the multiply's operand (.H0_H0, .H1_H1).
  __device__ __forceinline__ uint32_t pair(int group) const {
    const uint32_t both = group % 2 ? odd : even;
    uint32_t d;
    if (group / 2) asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h};}" : "=r"(d) : "r"(both));
    else asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l};}" : "=r"(d) : "r"(both));
    return d;
  }
};

// One K step (16) of a 64-row block: `word` holds this thread's eight codes.
template <typename T>
__device__ __forceinline__ void decode(uint32_t word, uint32_t factor_low, uint32_t factor_high, uint32_t (&a)[4]) {
  Mxfp4<T>::expand(word, a);
  a[0] = Mxfp4<T>::scale(a[0], factor_low);
  a[1] = Mxfp4<T>::scale(a[1], factor_high);
  a[2] = Mxfp4<T>::scale(a[2], factor_low);
  a[3] = Mxfp4<T>::scale(a[3], factor_high);
}

}  // namespace vllm_humming
