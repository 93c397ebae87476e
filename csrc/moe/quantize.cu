// SPDX-License-Identifier: Apache-2.0
// Tokens to e4m3, sorted: row r holds x[slots[r] / top_k], with one scale for each 128 columns, whose places are those of fp8_place. Tokens
// that are e4m3 already keep their codes and scales.
#include <type_traits>
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

// Eight columns' codes, and the scale of their group of 128, of which kGroupThreads neighbouring threads hold a part each.
template <typename T2>
struct Quantized {
  uint2 codes;
  float scale;
  __device__ __forceinline__ explicit Quantized(const uint4& value) {
    const T2* pairs = reinterpret_cast<const T2*>(&value);
    float2 f[4];
    float amax = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      f[j] = unpack(pairs[j]);
      amax = ptx::max_nan(amax, ptx::max_nan(fabsf(f[j].x), fabsf(f[j].y)));
    }
#pragma unroll
    for (int d = 1; d < kGroupThreads; d *= 2) amax = ptx::max_nan(amax, __shfl_xor_sync(~0u, amax, d));
    const Fp8Scale fp8(amax);
    uint32_t pair[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) pair[j] = to_fp8(f[j].x * fp8.factor, f[j].y * fp8.factor);
    codes = make_uint2(pair[0] | pair[1] << 16, pair[2] | pair[3] << 16);
    scale = fp8.scale;
  }
};

// Batch rows and kColumns columns a CTA: several rows in flight hide latency, one alone spreads small batches over more CTAs. T2: pairs of
// the tokens' type.
template <typename T2, int Batch>
__global__ void __launch_bounds__(kThreads) quantize(const __grid_constant__ QuantizeParams p) {
  constexpr bool kGiven = std::is_same_v<T2, __nv_fp8x2_e4m3>;  // codes and scales are there already
  using Vector = std::conditional_t<kGiven, uint2, uint4>;
  const RowList& list = p.list;
  const int v = blockIdx.y * kThreads + threadIdx.x, groups = (p.columns + kBlockK - 1) / kBlockK;
  const bool inside = v < p.columns / kVector;     // the last group's other columns are zeros, which no maximum sees
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  const int begin = list.begin ? __ldcg(list.begin) : 0, rows = list.end ? min(__ldcg(list.end), list.rows) : list.rows;
  const int first = blockIdx.x * Batch;
  if (max(first, begin) >= min(first + Batch, rows)) return;
  bool wanted[Batch];
#pragma unroll
  for (int i = 0; i < Batch; ++i) wanted[i] = first + i >= begin && first + i < rows;
  if (p.counts) {
    bool any = false;
#pragma unroll
    for (int i = 0; i < Batch; ++i) {
      const int row = min(first + i, rows - 1);
      wanted[i] = wanted[i] && row % p.rows_each < __ldcg(p.counts + row / p.rows_each);
      any = any || wanted[i];
    }
    if (!any) return;
  }
  const Vector* x = static_cast<const Vector*>(p.x) + v;
  Vector value[Batch];
  int token[Batch];
#pragma unroll
  for (int i = 0; i < Batch; ++i) {
    const int row = max(min(first + i, rows - 1), begin);
    token[i] = list.slots ? __ldcg(list.slots + row) / list.top_k : row;
    value[i] = inside ? __ldg(x + int64_t(token[i]) * (p.columns / kVector)) : Vector{};
  }
  const int group = v / kGroupThreads, k = v % kGroupThreads * kVector;
#pragma unroll
  for (int i = 0; i < Batch; ++i) {
    uint2 codes;
    float scale = 0.0f;
    if constexpr (kGiven) {
      codes = value[i];
      if (k == 0 && group < groups && wanted[i])
        scale = __ldg(p.x_scale + token[i] / p.rows_each * p.x_scale_strides[0] + token[i] % p.rows_each * p.x_scale_strides[1] +
                      group * p.x_scale_strides[2]);
    } else {
      const Quantized<T2> quantized(value[i]);
      codes = quantized.codes;
      scale = quantized.scale;
    }
    if (!wanted[i] || group >= groups) continue;
    uint8_t* out = static_cast<uint8_t*>(p.out) + (int64_t(first + i) * groups + group) * kBlockK;
    *reinterpret_cast<uint32_t*>(out + fp8_place(k)) = codes.x;
    *reinterpret_cast<uint32_t*>(out + fp8_place(k + 4)) = codes.y;
    if (k == 0) p.scale[int64_t(group) * p.scale_stride + first + i] = scale;
  }
}

// Few rows: one a CTA.
template <typename T2>
void launch_for(const QuantizeParams& p, cudaStream_t stream) {
  const int columns = (p.columns + kColumns - 1) / kColumns, rows = p.list.rows;
  const bool few = int64_t(rows) * columns <= kFewCtas;
  const dim3 grid(few ? rows : (rows + kBatch - 1) / kBatch, columns);
  launch(few ? quantize<T2, 1> : quantize<T2, kBatch>, grid, kThreads, 0, stream, p);
}

}  // namespace

void launch_quantize(TokenType type, const QuantizeParams& p, cudaStream_t stream) {
  if (type == TokenType::kBf16) launch_for<__nv_bfloat162>(p, stream);
  else if (type == TokenType::kFp16) launch_for<__half2>(p, stream);
  else launch_for<__nv_fp8x2_e4m3>(p, stream);
}

}  // namespace vllm_humming
