// SPDX-License-Identifier: Apache-2.0
// The up GEMM's epilogue for FP8 layers: activations quantised to e4m3, one scale a row and 128 intermediate channels.
#pragma once
#include <cuda_fp8.h>
#include "../mma/fp8.cuh"
#include "epilogue.cuh"
#include "quantize.cuh"

namespace vllm_humming::gemm {

// Stores a tile, kStoreTokens tokens at a time. The 128 channels of a scale are those of the whole tile where the
// activation is gated (four blocks of 32), those of one warpgroup otherwise (two blocks of 64): each warp puts its largest magnitudes
// where all of them can read them.
template <typename C>
__device__ __forceinline__ void store_fp8(const GemmParams& p, const Shared& s, const TileInfo<C>& info, const TokenTile& tile, int warpgroup,
                                          int block0, int& buffer, const float (&acc)[C::kBlocks][C::kMaxWidth / 2]) {
  static_assert(C::kWarpgroups == 2 && C::kBlocks == 2, "a tile holds the 128 channels of a scale");
  constexpr int kTokens = C::kStoreTokens, kStride = kBlockK + 16, kThreadTokens = kTokens / 4;
  static_assert(kTokens * kStride <= C::kStoreBytes);
  const int thread = ptx::opaque(threadIdx.x % 128), warp = thread / 32, lane = thread % 32, g = lane / 4, q = lane % 4;
  const bool gated = is_gated(p.activation);
  const int group = block0 / (gated ? 4 : 2);                      // of 128 channels
  // All threads that share a scale.
  const auto share = [&] {
    if (gated) ptx::named_barrier<3>(C::kConsumers);
    else warpgroup_barrier<C>(warpgroup);
  };
  const RowFactors<C> factors(p, info, (warpgroup * C::kBlocks * kBlockRows + warp * 16 + g) * 4);
#pragma unroll 1
  for (int first = 0; first < tile.count; first += kTokens) {
    float v[C::kBlocks][kTokens / 2];
    take_chunk<C>(acc, first / kTokens, v);
    finish<C, Stage::kUp>(p, info, factors, first, q, v);
    // This thread's tokens: 8 j + 2 q + c, at [2 j + c].
    float amax[kThreadTokens];
#pragma unroll
    for (int t = 0; t < kThreadTokens; ++t) {
      float m = 0.0f;
#pragma unroll
      for (int b = 0; b < C::kBlocks; ++b) {
        m = ptx::max_nan(m, fabsf(v[b][t / 2 * 4 + t % 2]));
        if (!gated) m = ptx::max_nan(m, fabsf(v[b][t / 2 * 4 + 2 + t % 2]));
      }
#pragma unroll
      for (int d = 4; d < 32; d *= 2) m = ptx::max_nan(m, __shfl_xor_sync(~0u, m, d));
      amax[t] = m;
    }
    const uint32_t shared_amax = s.amax + buffer * C::kAmaxBytes;
    if (g == 0) {
#pragma unroll
      for (int t = 0; t < kThreadTokens; ++t)
        ptx::store_shared_4(shared_amax + ((t / 2 * 8 + 2 * q + t % 2) * 8 + warpgroup * 4 + warp) * 4, __float_as_uint(amax[t]));
    }
    share();
    // Each lane works one token's scale out.
    const int mine = lane % kTokens;
    float m = 0.0f;
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      if (!gated && w != warpgroup) continue;
      const uint4 u = ptx::load_shared_16(shared_amax + mine * 32 + w * 16);
      m = ptx::max_nan(m, ptx::max_nan(ptx::max_nan(__uint_as_float(u.x), __uint_as_float(u.y)),
                                       ptx::max_nan(__uint_as_float(u.z), __uint_as_float(u.w))));
    }
    const Fp8Scale scale(m);
    if (lane < kTokens && warp == 0 && (!gated || warpgroup == 0) && first + mine < tile.count)
      p.out_scale[size_t(group) * p.scale_stride + tile.row + first + mine] = scale.scale;
    float factor[kThreadTokens];
#pragma unroll
    for (int t = 0; t < kThreadTokens; ++t) factor[t] = __shfl_sync(~0u, scale.factor, t / 2 * 8 + 2 * q + t % 2);
    const uint32_t staging = s.store + ((gated ? 0 : warpgroup * 2) + buffer) * C::kStoreBytes;
#pragma unroll
    for (int b = 0; b < C::kBlocks; ++b)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (gated && h > 0) continue;
        const int place = fp8_place(gated ? (warpgroup * C::kBlocks + b) * 32 + warp * 8 + g : b * 64 + warp * 16 + h * 8 + g);
#pragma unroll
        for (int j = 0; j < kTokens / 8; ++j) {
          const uint32_t pair = to_fp8(v[b][4 * j + 2 * h] * factor[2 * j], v[b][4 * j + 2 * h + 1] * factor[2 * j + 1]);
          const uint32_t at = staging + (j * 8 + 2 * q) * kStride + place;
          ptx::store_shared_1(at, pair & 0xFF);
          ptx::store_shared_1(at + kStride, pair >> 8);
        }
      }
    share();
    const int writer = gated ? warpgroup * 128 + thread : thread, r = writer / 8;
    if (r < kTokens && first + r < tile.count)
      *reinterpret_cast<uint4*>(static_cast<uint8_t*>(p.out) + size_t(tile.row + first + r) * p.out_stride + group * kBlockK + writer % 8 * 16) =
          ptx::load_shared_16(staging + r * kStride + writer % 8 * 16);
    buffer ^= 1;
  }
}

}  // namespace vllm_humming::gemm
