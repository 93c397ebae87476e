// SPDX-License-Identifier: Apache-2.0
// e4m3 with one fp32 scale a group of 128, as both GEMMs of an FP8 layer read it.
#pragma once
#include <cstdint>
#include <cuda_fp8.h>
#include "../ptx/ptx.cuh"
#include "fp8_scale.h"

namespace vllm_humming {

// amax: the largest magnitude of the group.
__device__ __forceinline__ Fp8Scale fp8_scale(float amax) { return Fp8Scale(amax, ptx::reciprocal(Fp8Scale::divisor(amax))); }

// Two values, rounded to nearest even and saturated; `low` in the low byte.
__device__ __forceinline__ uint32_t to_fp8(float low, float high) {
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}

}  // namespace vllm_humming
