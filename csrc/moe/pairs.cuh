// SPDX-License-Identifier: Apache-2.0
// Pairs of 16-bit activations as fp32.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace vllm_humming {

__device__ __forceinline__ float2 unpack(__nv_bfloat162 v) { return __bfloat1622float2(v); }
__device__ __forceinline__ float2 unpack(__half2 v) { return __half22float2(v); }

}  // namespace vllm_humming
