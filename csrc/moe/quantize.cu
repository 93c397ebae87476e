// SPDX-License-Identifier: Apache-2.0
// Tokens to e4m3, sorted: row r holds x[slots[r] / top_k], with one scale for each 128 columns, whose places are those of fp8_place.
#include "../mma/fp8.cuh"
#include "../ptx/ptx.cuh"
#include "launch.h"
#include "pairs.cuh"
#include "quantize.cuh"

namespace vllm_humming {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 8;                       // columns a thread
constexpr int kGroupThreads = kBlockK / kVector;
constexpr int kColumns = kThreads * kVector;     // a CTA
constexpr int kBatch = 4;                        // rows a CTA of large batches
constexpr int kFewCtas = 1024;

// Batch rows and kColumns columns a CTA: several rows in flight hide latency, one alone spreads small batches over more CTAs.
template <typename T2, int Batch>
__global__ void __launch_bounds__(kThreads) quantize(const __grid_constant__ QuantizeParams p) {
  const int v = blockIdx.y * kThreads + threadIdx.x, groups = (p.columns + kBlockK - 1) / kBlockK;
  const bool inside = v < p.columns / kVector;     // the last group's other columns are zeros, which no maximum sees
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  const int rows = p.rows_end ? min(__ldcg(p.rows_end), p.rows) : p.rows;
  const int first = blockIdx.x * Batch;
  if (first >= rows) return;
  const uint4* x = static_cast<const uint4*>(p.x) + v;
  uint4 value[Batch];
#pragma unroll
  for (int i = 0; i < Batch; ++i) {
    const int row = min(first + i, rows - 1);
    value[i] = inside ? __ldg(x + int64_t(p.slots ? __ldcg(p.slots + row) / p.top_k : row) * (p.columns / kVector)) : uint4{};
  }
#pragma unroll
  for (int i = 0; i < Batch; ++i) {
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
    const int group = v / kGroupThreads;
    if (first + i >= rows || group >= groups) continue;
    const Fp8Scale scale = fp8_scale(amax);
    uint32_t codes[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) codes[j] = to_fp8(f[j].x * scale.factor, f[j].y * scale.factor);
    uint8_t* out = static_cast<uint8_t*>(p.out) + (int64_t(first + i) * groups + group) * kBlockK;
    const int k = v % kGroupThreads * kVector;
    *reinterpret_cast<uint32_t*>(out + fp8_place(k)) = codes[0] | codes[1] << 16;
    *reinterpret_cast<uint32_t*>(out + fp8_place(k + 4)) = codes[2] | codes[3] << 16;
    if (k == 0) p.scale[int64_t(group) * p.scale_stride + first + i] = scale.scale;
  }
}

}  // namespace

void launch_quantize(DType dtype, const QuantizeParams& p, cudaStream_t stream) {
  const int columns = (p.columns + kColumns - 1) / kColumns;
  const bool few = int64_t(p.rows) * columns <= kFewCtas;
  const dim3 grid(few ? p.rows : (p.rows + kBatch - 1) / kBatch, columns);
  if (dtype == DType::kBf16) launch(few ? quantize<__nv_bfloat162, 1> : quantize<__nv_bfloat162, kBatch>, grid, kThreads, 0, stream, p);
  else launch(few ? quantize<__half2, 1> : quantize<__half2, kBatch>, grid, kThreads, 0, stream, p);
}

}  // namespace vllm_humming
