// SPDX-License-Identifier: Apache-2.0
// Accumulators to global memory: row scale, bias and activation (up GEMM) or router weight (down GEMM), one rounding.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "tile.cuh"

namespace vllm_humming::gemm {

__device__ __forceinline__ uint32_t pack(float low, float high, __nv_bfloat16) {
  __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&v);
}
__device__ __forceinline__ uint32_t pack(float low, float high, __half) {
  __half2 v = __floats2half2_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&v);
}

__device__ __forceinline__ float swiglu(float gate, float up, float alpha, float beta, float limit) {
  gate = ptx::min_nan(gate, limit);
  up = ptx::min_nan(ptx::max_nan(up, -limit), limit);
  return (up + beta) * __fdividef(gate, 1.0f + __expf(-alpha * gate));
}

__device__ __forceinline__ float gelu_tanh(float x) {
  // 0.5 * (1 + tanh(u)) = sigmoid(2 u)
  const float u = 0.7978845608028654f * fmaf(0.044715f * x * x, x, x);
  return __fdividef(x, 1.0f + __expf(-2.0f * u));
}

// v[half][token], half 0 the gate and 1 the up value -> the channel's two tokens.
template <typename T>
__device__ __forceinline__ uint32_t activate_pair(const GemmParams& p, const float (&v)[2][2], T) {
  if (p.activation == Activation::kSwiglu)
    return pack(swiglu(v[0][0], v[1][0], p.alpha, p.beta, p.limit), swiglu(v[0][1], v[1][1], p.alpha, p.beta, p.limit), T());
  return pack(gelu_tanh(v[0][0]) * v[1][0], gelu_tanh(v[0][1]) * v[1][1], T());
}

// Barrier ids as constants: a run-time id would reserve all sixteen.
template <typename C>
__device__ __forceinline__ void warpgroup_barrier(int warpgroup) {
  static_assert(C::kWarpgroups <= 2);
  if (C::kWarpgroups == 1 || warpgroup == 0) ptx::named_barrier<1>(128);
  else ptx::named_barrier<2>(128);
}

// Stores one warpgroup's blocks, kStoreTokens tokens at a time: transposed to token rows in one of two staging buffers, then 16 bytes a
// thread. `buffer` alternates, across tiles too, so that one barrier a chunk is enough.
template <typename T, typename C, Stage S, int N>
__device__ __forceinline__ void store(const GemmParams& p, const Shared& s, const TileInfo<C>& info, const TokenTile& tile, int warpgroup,
                                      int block0, int& buffer, const float (&acc)[C::kBlocks][N / 2]) {
  static_assert(N % C::kStoreTokens == 0, "a store chunk would run past the accumulators");
  const int thread = ptx::opaque(threadIdx.x % 128), warp = thread / 32, lane = thread % 32, g = lane / 4, q = lane % 4;
  const bool gated = S == Stage::kUp && p.activation != Activation::kRelu2;
  const int columns = gated ? kBlockRows / 2 : kBlockRows;         // output channels of one 64-row block
  const int column0 = block0 * columns;
  const uint32_t rows = (warpgroup * C::kBlocks * kBlockRows + warp * 16 + g) * 4;
  float scale[C::kBlocks][2], bias[C::kBlocks][2];
#pragma unroll
  for (int b = 0; b < C::kBlocks; ++b)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t at = rows + (b * kBlockRows + h * 8) * 4;
      scale[b][h] = __uint_as_float(ptx::load_shared_4(info.row_scale() + at));
      bias[b][h] = p.bias ? __uint_as_float(ptx::load_shared_4(info.bias() + at)) : 0.0f;
    }
#pragma unroll
  for (int first = 0; first < N; first += C::kStoreTokens) {
    if (first >= tile.count) break;
    const uint32_t staging = s.store + (warpgroup * 2 + buffer) * C::kStoreBytes;
#pragma unroll
    for (int j = first / 8; j < (first + C::kStoreTokens) / 8; ++j) {
      const uint2 w = ptx::load_shared_8(info.weights() + (j * 8 + 2 * q) * 4);  // past count: whatever was there, never stored
      const float weight[2] = {__uint_as_float(w.x), __uint_as_float(w.y)};
      const uint32_t row = staging + (j * 8 - first + lane % 8) * C::kStoreStride;
#pragma unroll
      for (int b = 0; b < C::kBlocks; ++b) {
        float v[2][2];  // [half][token]
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const float x = acc[b][4 * j + 2 * h + c] * scale[b][h];
            v[h][c] = S == Stage::kUp ? fmaf(x, weight[c], bias[b][h]) : (x + bias[b][h]) * weight[c];
          }
        if (gated) {
          ptx::store_matrix_transposed(row + (b * 32 + warp * 8) * 2, activate_pair(p, v, T()));
        } else {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            if constexpr (S == Stage::kUp) {
#pragma unroll
              for (int c = 0; c < 2; ++c) {
                const float r = ptx::max_nan(v[h][c], 0.0f);
                v[h][c] = r * r;
              }
            }
            ptx::store_matrix_transposed(row + (b * 64 + warp * 16 + h * 8) * 2, pack(v[h][0], v[h][1], T()));
          }
        }
      }
    }
    warpgroup_barrier<C>(warpgroup);
    const int chunks = C::kBlocks * columns / 8;                   // 16-byte chunks of a token's row: a power of two
    for (int i = thread; i < C::kStoreTokens * chunks; i += 128) {
      const int token = first + i / chunks, column = column0 + i % chunks * 8;
      if (token < tile.count && column < p.out_columns) {
        const int row = S == Stage::kDown ? int(ptx::load_shared_4(info.slots() + token * 4)) : tile.row + token;
        const uint4 v = ptx::load_shared_16(staging + (token - first) * C::kStoreStride + i % chunks * 16);
        *reinterpret_cast<uint4*>(static_cast<T*>(p.out) + size_t(row) * p.out_stride + column) = v;
      }
    }
    buffer ^= 1;
  }
}

}  // namespace vllm_humming::gemm
