// SPDX-License-Identifier: Apache-2.0
// e4m3 with one fp32 scale a group of 128, as both GEMMs of an FP8 layer read it.
#pragma once
#include <cstdint>
#include <cuda_fp8.h>
#include "../ptx/ptx.cuh"

namespace vllm_humming {

// The scale of a group whose largest magnitude is amax, and the factor that takes its values to e4m3. A group of zeros has a finite scale;
// NaN and infinity spread to every product with the group. amax / 448 and 448 / amax, correctly rounded for every amax (tests/test_fp8.py), in
// a few instructions: the division's own subroutine is a call, behind which the compiler keeps nothing in uniform registers.
struct Fp8Scale {
  static constexpr float kMax = 448.0f, kLeast = 0x1p-100f;
  float scale, factor;
  __device__ __forceinline__ explicit Fp8Scale(float amax) {
    amax = amax < kLeast ? kLeast : amax;  // keeps a NaN
    const bool infinite = amax > 0x1.fffffep127f;
    const float quotient = amax * (1.0f / kMax);
    scale = infinite ? amax : fmaf(fmaf(-quotient, kMax, amax), 1.0f / kMax, quotient);
    const float small = amax * 0x1p-9f;    // its reciprocal is a normal number
    float r = ptx::reciprocal(small);
    r = fmaf(fmaf(-small, r, 1.0f), r, r);
    const float f = (kMax * 0x1p-9f) * r;
    factor = infinite ? 0.0f : fmaf(fmaf(-f, small, kMax * 0x1p-9f), r, f);
  }
};

// Two values, rounded to nearest even and saturated; `low` in the low byte.
__device__ __forceinline__ uint32_t to_fp8(float low, float high) {
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}

}  // namespace vllm_humming
