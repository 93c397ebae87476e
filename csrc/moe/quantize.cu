// SPDX-License-Identifier: Apache-2.0
// Tokens to e4m3, sorted: row r holds x[slots[r] / top_k], with one scale for each 128 columns.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "../ptx/ptx.cuh"
#include "launch.h"
#include "quantize.cuh"

namespace vllm_humming {
namespace {

constexpr int kThreads = 256;
constexpr int kBatch = 4;                        // rows in flight a thread
constexpr int kVector = 8;                       // columns a thread
constexpr int kGroupThreads = kBlockK / kVector;

__device__ __forceinline__ float2 unpack(__nv_bfloat162 v) { return __bfloat1622float2(v); }
__device__ __forceinline__ float2 unpack(__half2 v) { return __half22float2(v); }

template <typename T2>
__global__ void __launch_bounds__(kThreads) quantize(const __grid_constant__ QuantizeParams p) {
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  const int rows = p.rows_end ? min(*p.rows_end, p.rows) : p.rows;
  const int first = blockIdx.x * kBatch;
  if (first >= rows) return;
  const int vectors = p.columns / kVector;
  const uint4* x = static_cast<const uint4*>(p.x);
  int64_t source[kBatch];
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    const int row = min(first + i, rows - 1);
    source[i] = int64_t(p.slots ? p.slots[row] / p.top_k : row) * vectors;
  }
  // Whole warps, for the shuffles; columns past the end are zeros, which no maximum sees.
  for (int v = threadIdx.x; v / 32 * 32 < vectors; v += kThreads) {
    uint4 value[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) value[i] = v < vectors ? __ldg(x + source[i] + v) : uint4{};
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const T2* pairs = reinterpret_cast<const T2*>(&value[i]);
      float2 f[4];
      float amax = 0.0f;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        f[j] = unpack(pairs[j]);
        amax = ptx::max_nan(amax, ptx::max_nan(fabsf(f[j].x), fabsf(f[j].y)));
      }
#pragma unroll
      for (int d = 1; d < kGroupThreads; d *= 2) amax = ptx::max_nan(amax, __shfl_xor_sync(~0u, amax, d));
      if (first + i >= rows || v >= vectors) continue;
      const Fp8Scale scale(amax);
      uint32_t codes[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) codes[j] = to_fp8(f[j].x * scale.factor, f[j].y * scale.factor);
      static_cast<uint2*>(p.out)[int64_t(first + i) * vectors + v] = make_uint2(codes[0] | codes[1] << 16, codes[2] | codes[3] << 16);
      if (v % kGroupThreads == 0) p.scale[int64_t(v / kGroupThreads) * p.scale_stride + first + i] = scale.scale;
    }
  }
}

}  // namespace

void launch_quantize(DType dtype, const QuantizeParams& p, cudaStream_t stream) {
  launch(dtype == DType::kBf16 ? quantize<__nv_bfloat162> : quantize<__half2>, (p.rows + kBatch - 1) / kBatch, kThreads, 0, stream, p);
}

}  // namespace vllm_humming
