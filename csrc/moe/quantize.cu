// SPDX-License-Identifier: Apache-2.0
// Tokens to e4m3, sorted: row r holds x[slots[r] / top_k], with one scale for each 128 columns, whose places are those of fp8_place. By tokens
// in a layer, by rows where the caller has grouped them. Tokens that are e4m3 already keep their codes and scales.
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
constexpr int kLoads = 4;                        // vectors a thread of large batches, by tokens

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
    const Fp8Scale fp8 = fp8_scale(amax);
    uint32_t pair[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) pair[j] = to_fp8(f[j].x * fp8.factor, f[j].y * fp8.factor);
    codes = make_uint2(pair[0] | pair[1] << 16, pair[2] | pair[3] << 16);
    scale = fp8.scale;
  }
};

// Batch rows and kColumns columns a CTA: several rows in flight hide latency, one alone spreads small batches over more CTAs. T2: pairs of
// the tokens' type. Grouped: not all rows of the list are wanted, or e4m3 tokens.
template <typename T2, int Batch, bool Grouped>
__global__ void __launch_bounds__(kThreads) quantize(const __grid_constant__ QuantizeParams p) {
  constexpr bool kGiven = std::is_same_v<T2, __nv_fp8x2_e4m3>;  // codes and scales are there already
  using Vector = std::conditional_t<kGiven, uint2, uint4>;
  const RowList& list = p.list;
  const int v = blockIdx.y * kThreads + threadIdx.x, groups = (p.columns + kBlockK - 1) / kBlockK;
  const bool inside = v < p.columns / kVector;     // the last group's other columns are zeros, which no maximum sees
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  const int rows = list.end ? min(__ldcg(list.end), list.rows) : list.rows;
  const int first = blockIdx.x * Batch;
  if (first >= rows) return;
  bool wanted[Batch];
#pragma unroll
  for (int i = 0; i < Batch; ++i) wanted[i] = first + i < rows;
  int begin = 0;
  if constexpr (Grouped) {
    if (list.begin) begin = __ldcg(list.begin);
    bool any = false;
#pragma unroll
    for (int i = 0; i < Batch; ++i) {
      const int row = min(first + i, rows - 1);
      wanted[i] = wanted[i] && row >= begin && (!p.counts || row % p.rows_each < __ldcg(p.counts + row / p.rows_each));
      any = any || wanted[i];
    }
    if (!any) return;
  }
  const Vector* x = static_cast<const Vector*>(p.x) + v;
  Vector value[Batch];
  int token[Batch];
#pragma unroll
  for (int i = 0; i < Batch; ++i) {
    const int row = Grouped ? max(min(first + i, rows - 1), begin) : min(first + i, rows - 1);
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

// By tokens: Loads vectors a thread of one token, quantised once, whose codes go from shared memory to each of the token's rows. A CTA has
// blockDim.x * Loads vectors, whole groups, of the token. Tokens are older than the kernel ahead, the routing, which has waited: reading (past L1,
// which may hold what these addresses were before) and arithmetic run beside it; of large batches those without a row are not read.
template <typename T2, int Loads>
__global__ void __launch_bounds__(kThreads, 4) quantize_tokens(const __grid_constant__ QuantizeParams p) {
  __shared__ __align__(128) uint8_t codes[kThreads * kVector * Loads];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, token = blockIdx.x, top_k = p.list.top_k;
  const int groups = (p.columns + kBlockK - 1) / kBlockK, vectors = p.columns / kVector;
  const int first = blockIdx.y * (blockDim.x * Loads / kGroupThreads);  // group
  const int* rows = p.row_of_slot + token * top_k;
  if (Loads > 1 && p.sparse) {
    ptx::grid_dependency_wait();
    bool any = false;
#pragma unroll 1
    for (int k = lane; k < top_k; k += 32) any = any || __ldcg(rows + k) >= 0;
    if (!__any_sync(~0u, any)) return;
  }
  const uint4* x = static_cast<const uint4*>(p.x) + int64_t(token) * vectors;
  uint4 value[Loads];
#pragma unroll
  for (int i = 0; i < Loads; ++i) value[i] = __ldcg(x + min(first * kGroupThreads + int(i * blockDim.x) + thread, vectors - 1));
  float scale[Loads];
#pragma unroll
  for (int i = 0; i < Loads; ++i) {
    const int v = i * blockDim.x + thread, k = thread % kGroupThreads * kVector;
    const Quantized<T2> quantized(first * kGroupThreads + v < vectors ? value[i] : uint4{});
    scale[i] = quantized.scale;
    const uint32_t out = ptx::smem_address(codes) + v / kGroupThreads * kBlockK;
    ptx::store_shared_4(out + fp8_place(k), quantized.codes.x);
    ptx::store_shared_4(out + fp8_place(k + 4), quantized.codes.y);
  }
  ptx::async_proxy_fence();
  __syncthreads();
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  uint8_t* out = static_cast<uint8_t*>(p.out) + int64_t(first) * kBlockK;
  const int bytes = min(int(blockDim.x * Loads / kGroupThreads), groups - first) * kBlockK;
#pragma unroll 1
  for (int k0 = 0; k0 < top_k; k0 += kGroupThreads) {  // a row a lane, in either half of each warp
    const int k = k0 + lane % kGroupThreads, row = k < top_k ? __ldcg(rows + k) : -1;
#pragma unroll 1
    for (int i = warp; i < min(kGroupThreads, top_k - k0); i += blockDim.x / 32) {
      const int r = __shfl_sync(~0u, row, i);
      if (lane == 0 && r >= 0) ptx::bulk_store(out + int64_t(r) * groups * kBlockK, ptx::smem_address(codes), bytes);
    }
    if (row < 0) continue;
#pragma unroll
    for (int i = 0; i < Loads; ++i) {
      const int group = first + (i * blockDim.x + thread) / kGroupThreads;
      if (group < groups) p.scale[int64_t(group) * p.scale_stride + row] = scale[i];
    }
  }
  ptx::bulk_commit();
  ptx::bulk_wait<0>();
}

// Few: one load a thread, which spreads a token over more CTAs. Otherwise as much of a token as a CTA can hold, in equal shares.
template <typename T2>
void launch_tokens(const QuantizeParams& p, cudaStream_t stream) {
  const int tokens = p.list.rows / p.list.top_k, groups = (p.columns + kBlockK - 1) / kBlockK;
  auto shares = [&](int loads) {  // CTAs a token
    const int most = kThreads * loads / kGroupThreads;
    return (groups + most - 1) / most;
  };
  const bool few = int64_t(tokens) * shares(1) <= kFewCtas;
  const int loads = few ? 1 : kLoads, share = (groups + shares(loads) - 1) / shares(loads), step = 32 * loads / kGroupThreads;
  const int warps = (share + step - 1) / step;
  const dim3 grid(tokens, (groups + warps * step - 1) / (warps * step));
  launch(few ? quantize_tokens<T2, 1> : quantize_tokens<T2, kLoads>, grid, warps * 32, 0, stream, p);
}

// Few rows: one a CTA.
template <typename T2, bool Grouped>
void launch_for(const QuantizeParams& p, cudaStream_t stream) {
  const int columns = (p.columns + kColumns - 1) / kColumns, rows = p.list.rows;
  const bool few = int64_t(rows) * columns <= kFewCtas;
  const dim3 grid(few ? rows : (rows + kBatch - 1) / kBatch, columns);
  launch(few ? quantize<T2, 1, Grouped> : quantize<T2, kBatch, Grouped>, grid, kThreads, 0, stream, p);
}

}  // namespace

void launch_quantize(TokenType type, const QuantizeParams& p, cudaStream_t stream) {
  if (p.row_of_slot) return (type == TokenType::kBf16 ? launch_tokens<__nv_bfloat162> : launch_tokens<__half2>)(p, stream);
  const bool grouped = p.list.begin || p.counts;
  if (type == TokenType::kFp8) launch_for<__nv_fp8x2_e4m3, true>(p, stream);
  else if (type == TokenType::kBf16) (grouped ? launch_for<__nv_bfloat162, true> : launch_for<__nv_bfloat162, false>)(p, stream);
  else (grouped ? launch_for<__half2, true> : launch_for<__half2, false>)(p, stream);
}

}  // namespace vllm_humming
