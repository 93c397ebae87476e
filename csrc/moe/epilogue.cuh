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

// Barrier ids as constants: a run-time id would reserve all sixteen.
template <typename C>
__device__ __forceinline__ void warpgroup_barrier(int warpgroup) {
  static_assert(C::kWarpgroups <= 4);
  if (C::kWarpgroups == 1 || warpgroup == 0) ptx::named_barrier<1>(128);
  else if (C::kWarpgroups == 2 || warpgroup == 1) ptx::named_barrier<2>(128);
  else if (C::kWarpgroups == 3 || warpgroup == 2) ptx::named_barrier<3>(128);
  else ptx::named_barrier<4>(128);
}

// Accumulators of store chunk `chunk`, one of [Low, High): a tree of branches, since selects would touch every accumulator for each chunk.
template <typename C, int Low = 0, int High = C::kMaxWidth / C::kStoreTokens>
__device__ __forceinline__ void take_chunk(const float (&acc)[C::kBlocks][C::kMaxWidth / 2], int chunk, float (&v)[C::kBlocks][C::kStoreTokens / 2]) {
  constexpr int kMiddle = (Low + High) / 2;
  if constexpr (High - Low > 1) {
    if (chunk < kMiddle) take_chunk<C, Low, kMiddle>(acc, chunk, v);
    else take_chunk<C, kMiddle, High>(acc, chunk, v);
  } else {
#pragma unroll
    for (int b = 0; b < C::kBlocks; ++b)
#pragma unroll
      for (int i = 0; i < C::kStoreTokens / 2; ++i) v[b][i] = ptx::move(acc[b][Low * (C::kStoreTokens / 2) + i]);
  }
}

// v[block][4 * (token / 8) + 2 * half + token % 2], half 0 the gate and 1 the up value of a channel -> the channels' activations, in the
// places of half 0.
template <typename C, typename F>
__device__ __forceinline__ void activate_gated(float (&v)[C::kBlocks][C::kStoreTokens / 2], F activation) {
#pragma unroll
  for (int b = 0; b < C::kBlocks; ++b)
#pragma unroll
    for (int i = 0; i < C::kStoreTokens / 2; i += 4)
#pragma unroll
      for (int c = 0; c < 2; ++c) v[b][i + c] = activation(v[b][i + c], v[b][i + 2 + c]);
}

// Row scale and bias of a thread's rows g and g + 8 in each block. `rows`: byte offset of the first of them in the tile's arrays.
template <typename C>
struct RowFactors {
  float scale[C::kBlocks][2], bias[C::kBlocks][2];
  __device__ __forceinline__ RowFactors(const GemmParams& p, const TileInfo<C>& info, uint32_t rows) {
#pragma unroll
    for (int b = 0; b < C::kBlocks; ++b)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t at = rows + (b * kBlockRows + h * 8) * 4;
        scale[b][h] = __uint_as_float(ptx::load_shared_4(info.row_scale() + at));
        bias[b][h] = p.bias ? __uint_as_float(ptx::load_shared_4(info.bias() + at)) : 0.0f;
      }
  }
};

// A chunk's accumulators v, whose tokens start at `first`, to what the GEMM puts out, in fp32: the activations of the up GEMM (gated: in
// the places of half 0), the weighted outputs of the down GEMM.
template <typename C, Stage S>
__device__ __forceinline__ void finish(const GemmParams& p, const TileInfo<C>& info, const RowFactors<C>& factors, int first, int q,
                                       float (&v)[C::kBlocks][C::kStoreTokens / 2]) {
#pragma unroll
  for (int j = 0; j < C::kStoreTokens / 8; ++j) {
    const uint2 w = ptx::load_shared_8(info.weights() + (first + j * 8 + 2 * q) * 4);  // past count: whatever was there, never stored
    const float weight[2] = {__uint_as_float(w.x), __uint_as_float(w.y)};
#pragma unroll
    for (int b = 0; b < C::kBlocks; ++b)
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = v[b][4 * j + 2 * h + c];
          x *= factors.scale[b][h];
          x = S == Stage::kUp ? fmaf(x, weight[c], factors.bias[b][h]) : (x + factors.bias[b][h]) * weight[c];
        }
  }
  if constexpr (S == Stage::kUp) {
    if (p.activation == Activation::kSwiglu) {
      activate_gated<C>(v, [&](float gate, float up) { return swiglu(gate, up, p.alpha, p.beta, p.limit); });
    } else if (p.activation == Activation::kGeluTanh) {
      activate_gated<C>(v, [](float gate, float up) { return gelu_tanh(gate) * up; });
    } else {
      if (kGathers<C, S> && p.activation == Activation::kNone) return;
#pragma unroll
      for (int b = 0; b < C::kBlocks; ++b)
#pragma unroll
        for (int i = 0; i < C::kStoreTokens / 2; ++i) {
          const float r = ptx::max_nan(v[b][i], 0.0f);
          v[b][i] = r * r;
        }
    }
  }
}

// A staging buffer's tokens to global memory; BlockChunks: 16-byte chunks of a token that one 64-row block makes.
template <typename T, typename C, Stage S, int BlockChunks>
__device__ __forceinline__ void store_rows(const GemmParams& p, uint32_t source, const TileInfo<C>& info, const TokenTile& tile, int first,
                                           int column0, int thread) {
  constexpr int kChunks = C::kBlocks * BlockChunks, kStep = 128 / kChunks;
  static_assert(128 % kChunks == 0, "a thread would have to change its column");
  const int column = column0 + thread % kChunks * 8;
  if (column >= p.out_columns) return;
#pragma unroll
  for (int i = 0; i < C::kStoreTokens; i += kStep) {
    const int r = i + thread / kChunks, token = first + r;
    if (r < C::kStoreTokens && token < tile.count) {
      const int row = S == Stage::kDown ? int(ptx::load_shared_4(info.slots() + token * 4)) : tile.row + token;
      const uint4 v = ptx::load_shared_16(source + r * C::kStoreStride + thread % kChunks * 16);
      *reinterpret_cast<uint4*>(static_cast<T*>(p.out) + size_t(row) * p.out_stride + column) = v;
    }
  }
}

// Stores one warpgroup's blocks, kStoreTokens tokens at a time: transposed to token rows in one of two staging buffers, then 16 bytes a
// thread. `buffer` alternates, across tiles too, so that one barrier a chunk is enough. A loop, with one body for all token widths:
// unrolled over the accumulators this was 60 to 150 KB of code that ran once a tile, at the speed of instruction fetch.
template <typename T, typename C, Stage S>
__device__ __forceinline__ void store(const GemmParams& p, const Shared& s, const TileInfo<C>& info, const TokenTile& tile, int warpgroup,
                                      int block0, int& buffer, const float (&acc)[C::kBlocks][C::kMaxWidth / 2]) {
  const int thread = ptx::opaque(threadIdx.x % 128), warp = thread / 32, lane = thread % 32, g = lane / 4, q = lane % 4;
  const bool gated = S == Stage::kUp && is_gated(p.activation);
  const int columns = gated ? kBlockRows / 2 : kBlockRows;         // output channels of one 64-row block
  const int column0 = block0 * columns;
  const RowFactors<C> factors(p, info, (warpgroup / C::kSplitK * C::kBlocks * kBlockRows + warp * 16 + g) * 4);
#pragma unroll 1
  for (int first = 0; first < tile.count; first += C::kStoreTokens) {
    float v[C::kBlocks][C::kStoreTokens / 2];
    take_chunk<C>(acc, first / C::kStoreTokens, v);
    finish<C, S>(p, info, factors, first, q, v);
    const uint32_t staging = s.store + (warpgroup * 2 + buffer) * C::kStoreBytes;
#pragma unroll
    for (int j = 0; j < C::kStoreTokens / 8; ++j)
#pragma unroll
      for (int b = 0; b < C::kBlocks; ++b) {
        const uint32_t row = staging + (j * 8 + lane % 8) * C::kStoreStride;
        const float* x = v[b] + 4 * j;
        if (gated) {
          ptx::store_matrix_transposed(row + (b * 32 + warp * 8) * 2, pack(x[0], x[1], T()));
        } else {
#pragma unroll
          for (int h = 0; h < 2; ++h)
            ptx::store_matrix_transposed(row + (b * 64 + warp * 16 + h * 8) * 2, pack(x[2 * h], x[2 * h + 1], T()));
        }
      }
    warpgroup_barrier<C>(warpgroup);
    if (gated) store_rows<T, C, S, 4>(p, staging, info, tile, first, column0, thread);
    else store_rows<T, C, S, 8>(p, staging, info, tile, first, column0, thread);
    buffer ^= 1;
  }
}

}  // namespace vllm_humming::gemm
