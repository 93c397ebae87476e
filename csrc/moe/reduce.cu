// SPDX-License-Identifier: Apache-2.0
// out[token] = sum over k of y[token * top_k + k], k ascending, fp32. Slots without a local expert are skipped (y holds nothing there).
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "../ptx/ptx.cuh"
#include "launch.h"

namespace vllm_humming {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 8;
constexpr int kBatch = 8;  // loads in flight a thread

__device__ __forceinline__ float2 unpack(__nv_bfloat162 v) { return __bfloat1622float2(v); }
__device__ __forceinline__ float2 unpack(__half2 v) { return __half22float2(v); }
__device__ __forceinline__ void round_to(float2 v, __nv_bfloat162& d) { d = __float22bfloat162_rn(v); }
__device__ __forceinline__ void round_to(float2 v, __half2& d) { d = __float22half2_rn(v); }

template <typename T2>
__global__ void __launch_bounds__(kThreads) reduce(const __grid_constant__ ReduceParams p) {
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  const int vectors = p.columns / kVector;
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= int64_t(p.tokens) * vectors) return;
  const int token = int(i / vectors), column = int(i % vectors);
  const uint4* y = static_cast<const uint4*>(p.y) + int64_t(token) * p.top_k * vectors + column;
  float2 sum[4] = {};
  for (int k0 = 0; k0 < p.top_k; k0 += kBatch) {
    uint4 v[kBatch];
    bool valid[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      valid[k] = k0 + k < p.top_k &&
                 local_expert(p.topk_ids[int64_t(token) * p.top_k + k0 + k], p.expert_map, p.global_experts, p.local_experts) >= 0;
      if (valid[k]) v[k] = __ldcs(y + int64_t(k0 + k) * vectors);
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (!valid[k]) continue;
      const T2* pair = reinterpret_cast<const T2*>(&v[k]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 f = unpack(pair[j]);
        sum[j].x += f.x;
        sum[j].y += f.y;
      }
    }
  }
  uint4 result;
#pragma unroll
  for (int j = 0; j < 4; ++j) round_to(sum[j], reinterpret_cast<T2*>(&result)[j]);
  static_cast<uint4*>(p.out)[i] = result;
}

}  // namespace

void launch_reduce(DType dtype, const ReduceParams& p, cudaStream_t stream) {
  const int64_t threads = int64_t(p.tokens) * (p.columns / kVector);
  const int grid = int((threads + kThreads - 1) / kThreads);
  launch(dtype == DType::kBf16 ? reduce<__nv_bfloat162> : reduce<__half2>, grid, kThreads, 0, stream, p);
}

}  // namespace vllm_humming
