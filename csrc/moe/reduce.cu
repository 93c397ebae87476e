// SPDX-License-Identifier: Apache-2.0
// out[token] = sum over k of y[token * top_k + k], k ascending, fp32. Slots without a local expert are skipped (y holds nothing there).
#include <atomic>
#include "../ptx/ptx.cuh"
#include "entries.cuh"
#include "launch.h"
#include "pairs.cuh"

namespace vllm_humming {
namespace {

// Counters of layers of few entries. They must be zero at a layer's start, and no kernel before it could zero them in a workspace that may hold
// anything; so they are the library's own, zero from its loading on, and each layer's reduction zeroes what the layer used.
using Counters = FusedCounters<kMostFewEntries>;

// Layers that may overlap must not share counters. Layers of a captured graph keep theirs for good, others take turns; both go round, which is
// safe as long as the layers so far apart do not run at the same time.
constexpr int kCaptured = 8192, kEager = 512;
__device__ Counters counters[kCaptured + kEager];
std::atomic<unsigned> captured{0}, eager{0};

constexpr int kThreads = 256;
constexpr int kVector = 8;
constexpr int kBatch = 8;  // loads in flight a thread

__device__ __forceinline__ void round_to(float2 v, __nv_bfloat162& d) { d = __float22bfloat162_rn(v); }
__device__ __forceinline__ void round_to(float2 v, __half2& d) { d = __float22half2_rn(v); }

// Four CTAs an SM: 512 tokens of 2048 channels are one wave.
template <typename T2>
__global__ void __launch_bounds__(kThreads, 4) reduce(const __grid_constant__ ReduceParams p) {
  const int vectors = p.columns / kVector;
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= p.tokens * vectors) return;
  const int token = i / vectors, column = i - token * vectors;
  const uint4* y = static_cast<const uint4*>(p.y) + int64_t(token) * p.top_k * vectors + column;
  auto valid_from = [&](int k0) {  // bit k: slot k0 + k has an expert here
    int expert[kBatch];
    experts_of(p, token * p.top_k + k0, 1, (token + 1) * p.top_k, expert);
    uint32_t bits = 0;
#pragma unroll
    for (int k = 0; k < kBatch; ++k) bits |= uint32_t(expert[k] >= 0) << k;
    return bits;
  };
  uint32_t valid = valid_from(0);  // ids are older than the kernel ahead, which has waited
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  if (p.counters && blockIdx.x == 0) {
    for (int j = threadIdx.x; j < int(sizeof(*p.counters) / 4); j += min(kThreads, p.tokens * vectors)) reinterpret_cast<int*>(p.counters)[j] = 0;
  }
  float2 sum[4] = {};
#pragma unroll 1
  for (int k0 = 0; k0 < p.top_k; k0 += kBatch) {
    if (k0) valid = valid_from(k0);
    uint4 v[kBatch];
    // Where there is none, + 0, which leaves a sum as it is: none is -0.
#pragma unroll
    for (int k = 0; k < kBatch; ++k) v[k] = valid >> k & 1 ? __ldcs(y + int64_t(k0 + k) * vectors) : uint4{};
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
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

Counters* few_counters(cudaStream_t stream) {
  cudaStreamCaptureStatus status;
  check(cudaStreamIsCapturing(stream, &status), "ask whether a graph is captured");
  void* first = nullptr;
  check(cudaGetSymbolAddress(&first, counters), "find the counters");
  const unsigned at = status == cudaStreamCaptureStatusNone ? kCaptured + eager++ % kEager : captured++ % kCaptured;
  return static_cast<Counters*>(first) + at;
}

void launch_reduce(DType dtype, const ReduceParams& p, cudaStream_t stream) {
  const int64_t threads = int64_t(p.tokens) * (p.columns / kVector);
  const int grid = int((threads + kThreads - 1) / kThreads);
  launch(dtype == DType::kBf16 ? reduce<__nv_bfloat162> : reduce<__half2>, grid, kThreads, 0, stream, p);
}

}  // namespace vllm_humming
