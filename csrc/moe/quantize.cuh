// SPDX-License-Identifier: Apache-2.0
// e4m3 with one fp32 scale a group of 128, as both GEMMs of an FP8 layer read it.
#pragma once
#include <cstdint>
#include <cuda_fp8.h>

namespace vllm_humming {

// The scale of a group whose largest magnitude is amax, and the factor that takes its values to e4m3. A group of zeros has a finite scale;
// NaN and infinity spread to every product with the group.
struct Fp8Scale {
  static constexpr float kMax = 448.0f, kLeast = 0x1p-100f;
  float scale, factor;
  __device__ __forceinline__ explicit Fp8Scale(float amax) {
    amax = amax < kLeast ? kLeast : amax;  // keeps a NaN
    scale = __fdiv_rn(amax, kMax);
    factor = __fdiv_rn(kMax, amax);
  }
};

// Two values, rounded to nearest even and saturated; `low` in the low byte.
__device__ __forceinline__ uint32_t to_fp8(float low, float high) {
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}

}  // namespace vllm_humming
