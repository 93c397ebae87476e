// SPDX-License-Identifier: Apache-2.0
// A pair tile's consumers: main loop and epilogues. A warpgroup has every other block of 64 tokens; a thread's accumulators are tokens g and
// g + 8 of its warp's 16, packed weight rows 8 j + 2 q and the next: acc[block][4 j + 2 * (token g + 8) + row % 2].
#pragma once
#include "../../mma/wgmma_shared.cuh"
#include "../epilogue.cuh"
#include "../quantize.cuh"
#include "pair_producer.cuh"

namespace vllm_humming::gemm {

constexpr int kPairRows = 128, kPairValues = kPairRows / 2;

// First of the 16 tokens that a warp has in its block b.
__device__ __forceinline__ int pair_token(int b, int warpgroup, int warp) { return (2 * b + warpgroup) * 64 + warp * 16; }

// A stage that this warp's tokens and decoded weights are not read of any more. Copies to both CTAs wait for both.
template <typename C>
__device__ __forceinline__ void release_pair(const PairShared& s, int stage, int decoded, int rank, int lane) {
  if (lane > 0) return;
  ptx::mbarrier_arrive(s.empty + stage * 8);
  ptx::mbarrier_arrive_remote(ptx::map_shared(s.empty + stage * 8, rank ^ 1));
  ptx::mbarrier_arrive(s.decoded_empty + decoded * 8);
}

// Blocks blocks of 64 tokens over all K. The products of a stage are multiplied with their tokens' scales and added to acc ("promoted"); the other
// warpgroup has the tensor cores meanwhile. Decoded weights are there only once the stage's tokens and scales are. Nothing is in flight at a branch.
template <typename C, int Blocks>
__device__ __forceinline__ void multiply_pair(const GemmParams& p, const PairShared& s, Ring<C::kStages>& ring, Ring<C::kDecoded>& decoded,
                                              int warpgroup, int rank, float (&acc)[C::kBlocks][kPairValues]) {
  const int thread = ptx::opaque(threadIdx.x % 128), lane = thread % 32;
  // Opaque: the compiler would work out for each stage where in the cluster this shared memory lies, and wait for that.
  const uint32_t full = ptx::opaque(s.decoded_full), scales = ptx::opaque(s.scales + (pair_token(0, warpgroup, thread / 32) + lane / 4) * 4);
  const uint32_t first = ptx::uniform(warpgroup > 0) ? 64 * kBlockK / 16 : 0;
  float part[kPairValues] = {};
  ptx::mbarrier_wait(full + decoded.at * 8, decoded.parity);
#pragma unroll 1
  for (int kb = 0; kb < p.k_blocks; ++kb) {
    const uint32_t a = ptx::wgmma_descriptor(s.tokens + ring.at * C::kTokenBytes) + first;
    const uint32_t b = ptx::wgmma_descriptor(s.decoded + decoded.at * C::kDecodedBytes);
    const int stage = ring.at, buffer = decoded.at;
    ring.next();
    decoded.next();
#pragma unroll
    for (int i = 0; i < Blocks; ++i) {
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < kFp8Steps; ++step) {
        if (step == 0) wgmma_shared_128<false>(part, a + i * (128 * kBlockK / 16), b);
        else wgmma_shared_128<true>(part, a + i * (128 * kBlockK / 16) + step * 2, b + step * 2);
      }
      ptx::wgmma_commit();
      float scale[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) scale[h] = __uint_as_float(ptx::load_shared_4(scales + stage * C::kScaleBytes + (i * 128 + h * 8) * 4));
      const uint32_t ready = i + 1 < Blocks ? 0 : ptx::mbarrier_ready(full + decoded.at * 8, decoded.parity);
      ptx::wgmma_wait<0>();
      if (i + 1 == Blocks) release_pair<C>(s, stage, buffer, rank, lane);
#pragma unroll
      for (int j = 0; j < kPairValues; ++j) asm volatile("" : "+f"(part[j])::"memory");  // nothing reads part above the wait
#pragma unroll
      for (int j = 0; j < kPairValues; ++j) acc[i][j] = fmaf(part[j], scale[j / 2 % 2], acc[i][j]);
      if (i + 1 == Blocks && kb + 1 < p.k_blocks) ptx::mbarrier_wait_unless(ready, full + decoded.at * 8, decoded.parity);
    }
  }
}

// A warpgroup without tokens keeps the rings turning.
template <typename C>
__device__ __forceinline__ void skip_pair(const GemmParams& p, const PairShared& s, Ring<C::kStages>& ring, Ring<C::kDecoded>& decoded, int rank) {
#pragma unroll 1
  for (int kb = 0; kb < p.k_blocks; ++kb) {
    ptx::mbarrier_wait(s.decoded_full + decoded.at * 8, decoded.parity);
    __syncwarp();
    release_pair<C>(s, ring.at, decoded.at, rank, threadIdx.x % 32);
    ring.next();
    decoded.next();
  }
}

// Row scale and bias of packed rows 8 j + 2 q and the next.
struct PairFactors {
  float scale[2], bias[2] = {};
  template <typename C>
  __device__ __forceinline__ PairFactors(const GemmParams& p, const TileInfo<C>& info, int row) {
    const uint2 v = ptx::load_shared_8(info.row_scale() + row * 4);
    scale[0] = __uint_as_float(v.x), scale[1] = __uint_as_float(v.y);
    if (!p.bias) return;
    const uint2 b = ptx::load_shared_8(info.bias() + row * 4);
    bias[0] = __uint_as_float(b.x), bias[1] = __uint_as_float(b.y);
  }
};

// The down GEMM's, one block after the other: each warp turns its 16 tokens over in shared memory and stores whole rows, 16 bytes a lane.
template <typename T, typename C, int Blocks>
__device__ __forceinline__ void store_pair(const GemmParams& p, const PairShared& s, const TileInfo<C>& info, const TokenTile& tile, int warpgroup,
                                           int block0, const float (&acc)[C::kBlocks][kPairValues]) {
  const int thread = ptx::opaque(threadIdx.x % 128), warp = thread / 32, lane = thread % 32, g = lane / 4, q = lane % 4;
  const uint32_t staging = s.store + (warpgroup * 4 + warp) * C::kStoreBytes;
  const int column0 = block0 * kBlockRows + lane % 16 * 8;
#pragma unroll
  for (int b = 0; b < Blocks; ++b) {
    const int first = pair_token(b, warpgroup, warp);
    float weight[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) weight[h] = __uint_as_float(ptx::load_shared_4(info.weights() + (first + g + h * 8) * 4));
#pragma unroll
    for (int j = 0; j < kPairRows / 8; j += 2) {
      uint32_t v[2][2];  // [row octet][token half]
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const PairFactors f(p, info, (j + i) * 8 + 2 * q);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float* x = acc[b] + 4 * (j + i) + 2 * h;
          v[i][h] = pack((x[0] * f.scale[0] + f.bias[0]) * weight[h], (x[1] * f.scale[1] + f.bias[1]) * weight[h], T());
        }
      }
      ptx::store_matrix_4(staging + lane % 16 * C::kStoreStride + (j + lane / 16) * 16, v[0][0], v[0][1], v[1][0], v[1][1]);
    }
    __syncwarp();
    if (column0 < p.out_columns) {
#pragma unroll
      for (int r = lane / 16; r < 16; r += 2) {
        if (first + r < tile.count) {
          const int row = int(ptx::load_shared_4(info.slots() + (first + r) * 4));
          *reinterpret_cast<uint4*>(static_cast<T*>(p.out) + size_t(row) * p.out_stride + column0) =
              ptx::load_shared_16(staging + r * C::kStoreStride + lane % 16 * 16);
        }
      }
    }
    __syncwarp();
  }
}

// One block's values of the up GEMM, activated. Gated: v[4 w' + 2 h + c], w' = 4 * (64-row block) + w, of channel 32 * block + 8 w + 2 q + c, packed
// rows as in docs/kernel-notes.md; otherwise all of acc's.
template <typename C>
__device__ __forceinline__ void activate_pair(const GemmParams& p, const TileInfo<C>& info, int first, int g, int q, float (&x)[kPairValues]) {
  float weight[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) weight[h] = __uint_as_float(ptx::load_shared_4(info.weights() + (first + g + h * 8) * 4));
#pragma unroll
  for (int j = 0; j < kPairRows / 8; ++j) {
    const PairFactors f(p, info, j * 8 + 2 * q);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[4 * j + i] = fmaf(x[4 * j + i] * f.scale[i % 2], weight[i / 2], f.bias[i % 2]);
  }
  const auto gated = [&](auto activation) {  // octets 2 w' are gates, 2 w' + 1 ups
#pragma unroll
    for (int j = 0; j < kPairRows / 16; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) x[4 * j + i] = activation(x[8 * j + i], x[8 * j + 4 + i]);
  };
  if (p.activation == Activation::kSwiglu) {
    gated([&](float gate, float up) { return swiglu(gate, up, p.alpha, p.beta, p.limit); });
  } else if (p.activation == Activation::kGeluTanh) {
    gated([](float gate, float up) { return gelu_tanh(gate) * up; });
  } else {
#pragma unroll
    for (int i = 0; i < kPairValues; ++i) {
      const float r = ptx::max_nan(x[i], 0.0f);
      x[i] = r * r;
    }
  }
}

// Places of 16-bit halves: each lane of an even and odd pair has two bytes of token g and two of g + 8; the even one gets token g's four.
__device__ __forceinline__ uint32_t join_pair(uint32_t token_g, uint32_t token_g8, bool odd) {
  const uint32_t mine = odd ? token_g8 : token_g, theirs = __shfl_xor_sync(~0u, odd ? token_g : token_g8, 1);
  return odd ? theirs | mine << 16 : mine | theirs << 16;
}

// The up GEMM's: activations to e4m3, one scale a token and 128 channels. Those are both CTAs' where the activation is gated (64 channels each):
// corresponding warps, which have the same tokens, tell each other their largest magnitudes.
template <typename C, int Blocks>
__device__ __forceinline__ void store_pair_fp8(const GemmParams& p, const PairShared& s, const TileInfo<C>& info, const TokenTile& tile, int warpgroup,
                                               int block0, int rank, Ring<1>& exchanges, float (&acc)[C::kBlocks][kPairValues]) {
  const int thread = ptx::opaque(threadIdx.x % 128), warp = thread / 32, lane = thread % 32, g = lane / 4, q = lane % 4;
  const int consumer = warpgroup * 4 + warp;
  const bool gated = is_gated(p.activation);
  float amax[Blocks][2];
#pragma unroll
  for (int b = 0; b < Blocks; ++b) {
    activate_pair<C>(p, info, pair_token(b, warpgroup, warp), g, q, acc[b]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float m = 0.0f;
#pragma unroll
      for (int j = 0; j < kPairRows / 8; ++j)
        if (j < kPairRows / 16 || !gated) m = ptx::max_nan(m, ptx::max_nan(fabsf(acc[b][4 * j + 2 * h]), fabsf(acc[b][4 * j + 2 * h + 1])));
#pragma unroll
      for (int d = 1; d < 4; d *= 2) m = ptx::max_nan(m, __shfl_xor_sync(~0u, m, d));
      amax[b][h] = m;
    }
  }
  if (ptx::uniform(gated)) {
    const uint32_t mine = s.amax + consumer * C::kAmaxBytes, full = s.amax_full + consumer * 8, empty = s.amax_empty + consumer * 8;
    ptx::mbarrier_wait_cluster(empty, exchanges.parity ^ 1);
    if (q == 0) {
      const uint32_t theirs = ptx::map_shared(mine, rank ^ 1);
#pragma unroll
      for (int b = 0; b < Blocks; ++b)
#pragma unroll
        for (int h = 0; h < 2; ++h) ptx::store_remote_4(theirs + (b * 16 + h * 8 + g) * 4, __float_as_uint(amax[b][h]));
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive_remote_release(ptx::map_shared(full, rank ^ 1));
    ptx::mbarrier_wait_cluster(full, exchanges.parity);
#pragma unroll
    for (int b = 0; b < Blocks; ++b)
#pragma unroll
      for (int h = 0; h < 2; ++h) amax[b][h] = ptx::max_nan(amax[b][h], __uint_as_float(ptx::load_shared_4(mine + (b * 16 + h * 8 + g) * 4)));
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive_remote(ptx::map_shared(empty, rank ^ 1));
    exchanges.next();
  }
  const int group = block0 / (gated ? 4 : 2);
  const bool odd = q % 2;
#pragma unroll
  for (int b = 0; b < Blocks; ++b) {
    const int first = pair_token(b, warpgroup, warp);
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Fp8Scale scale = fp8_scale(amax[b][h]);
      factor[h] = scale.factor;
      const int token = first + g + h * 8;
      if (q == 0 && (!gated || rank == 0) && token < tile.count) p.out_scale[size_t(group) * p.scale_stride + tile.row + token] = scale.scale;
    }
    // K 8 i + 2 q .. of the group (fp8_place): 32 * (i % 4) + 16 * (q / 2) + 4 * (i / 4) + 2 * (q % 2).
    const auto octet = [&](int i) {
      uint32_t v[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) v[h] = to_fp8(acc[b][4 * i + 2 * h] * factor[h], acc[b][4 * i + 2 * h + 1] * factor[h]);
      return join_pair(v[0], v[1], odd);
    };
    const int token = first + g + (odd ? 8 : 0);
    uint8_t* out = static_cast<uint8_t*>(p.out) + size_t(tile.row + token) * p.out_stride + group * kBlockK + q / 2 * 16;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint2 low = make_uint2(octet(w), octet(w + 4));
      if (gated) {
        if (token < tile.count) *reinterpret_cast<uint2*>(out + w * 32 + rank * 8) = low;
      } else {
        const uint2 high = make_uint2(octet(w + 8), octet(w + 12));
        if (token < tile.count) *reinterpret_cast<uint4*>(out + w * 32) = make_uint4(low.x, low.y, high.x, high.y);
      }
    }
  }
}

}  // namespace vllm_humming::gemm
