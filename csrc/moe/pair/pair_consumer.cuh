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

// Blocks of 64 tokens that a warpgroup has in a tile of that width.
__device__ __forceinline__ int pair_blocks(int width, int warpgroup) { return (width / 64 + 1 - warpgroup) / 2; }
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

// Blocks blocks of 64 tokens over all K. The products of a stage are multiplied with their tokens' scales and added to acc ("promoted"). Decoded
// weights are there only once the stage's tokens and scales are. Nothing is in flight at a branch.
template <typename C, int Blocks>
__device__ __forceinline__ void multiply_pair(const GemmParams& p, const PairShared& s, Ring<C::kStages>& ring, Ring<C::kDecoded>& decoded,
                                              int warpgroup, int rank, float (&acc)[C::kBlocks][kPairValues]) {
  const int thread = ptx::opaque(threadIdx.x % 128), lane = thread % 32;
  // Opaque: the compiler would work out for each stage where in the cluster this shared memory lies, and wait for that.
  const uint32_t full = ptx::opaque(s.decoded_full);
  const uint32_t scales = full + (s.scales - s.decoded_full) + (pair_token(0, warpgroup, thread / 32) + lane / 4) * 4;
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

// Quarter `index` of the accumulators: 64 packed rows of a block of tokens; and back, to 16-value part `index` or to the quarter. Moves behind
// branches: an index would become selects over all of them. One body for all quarters: unrolled, the epilogues are read at the speed of instruction
// fetch.
constexpr int kQuarter = kPairValues / 2;

template <typename C, int I = 0>
__device__ __forceinline__ void take_quarter(const float (&acc)[C::kBlocks][kPairValues], int index, float (&x)[kQuarter]) {
  if constexpr (I + 1 < 2 * C::kBlocks) {
    if (ptx::uniform(index > I)) return take_quarter<C, I + 1>(acc, index, x);
  }
#pragma unroll
  for (int i = 0; i < kQuarter; ++i) x[i] = ptx::move(acc[I / 2][I % 2 * kQuarter + i]);
}
template <typename C, int Values, int I = 0>
__device__ __forceinline__ void put_quarter(float (&acc)[C::kBlocks][kPairValues], int index, const float (&x)[kQuarter]) {
  if constexpr (I + 1 < 2 * C::kBlocks) {
    if (ptx::uniform(index > I)) return put_quarter<C, Values, I + 1>(acc, index, x);
  }
#pragma unroll
  for (int i = 0; i < Values; ++i) acc[I / 2][I % 2 * Values + i] = ptx::move(x[i]);
}

// The down GEMM's: each warp turns its 16 tokens of a block over in shared memory and stores whole rows, 16 bytes a lane.
template <typename T, typename C>
__device__ __forceinline__ void store_pair(const GemmParams& p, const PairShared& s, const TileInfo<C>& info, const TokenTile& tile, int warpgroup,
                                           int blocks, int block0, const float (&acc)[C::kBlocks][kPairValues]) {
  const int thread = ptx::opaque(threadIdx.x % 128), warp = thread / 32, lane = thread % 32, g = lane / 4, q = lane % 4;
  const uint32_t staging = s.store + (warpgroup * 4 + warp) * C::kStoreBytes;
#pragma unroll 1
  for (int quarter = 0; ptx::uniform(quarter < 2 * blocks); ++quarter) {
    const int first = pair_token(quarter / 2, warpgroup, warp), rows = quarter % 2 * kBlockRows;
    float x[kQuarter];
    take_quarter<C>(acc, quarter, x);
    float weight[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) weight[h] = __uint_as_float(ptx::load_shared_4(info.weights() + (first + g + h * 8) * 4));
#pragma unroll
    for (int j = 0; j < kBlockRows / 8; j += 2) {
      uint32_t v[2][2];  // [row octet][token half]
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const PairFactors f(p, info, rows + (j + i) * 8 + 2 * q);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float* y = x + 4 * (j + i) + 2 * h;
          v[i][h] = pack((y[0] * f.scale[0] + f.bias[0]) * weight[h], (y[1] * f.scale[1] + f.bias[1]) * weight[h], T());
        }
      }
      ptx::store_matrix_4(staging + lane % 16 * C::kStoreStride + (j + lane / 16) * 16, v[0][0], v[0][1], v[1][0], v[1][1]);
    }
    __syncwarp();
    const int column = block0 * kBlockRows + rows + lane % 8 * 8;
    if (column < p.out_columns) {
#pragma unroll
      for (int r = lane / 8; r < 16; r += 4) {
        if (first + r < tile.count) {
          const int row = int(ptx::load_shared_4(info.slots() + (first + r) * 4));
          *reinterpret_cast<uint4*>(static_cast<T*>(p.out) + size_t(row) * p.out_stride + column) =
              ptx::load_shared_16(staging + r * C::kStoreStride + lane % 8 * 16);
        }
      }
    }
    __syncwarp();
  }
}

// A quarter of the up GEMM's values, activated. Gated: x[4 w + 2 h + c] becomes channel 8 w + 2 q + c of the 64-row block's 32 (packed rows as in
// docs/kernel-notes.md). rows: the quarter's first packed row in the tile.
template <typename C>
__device__ __forceinline__ void activate_pair(const GemmParams& p, const TileInfo<C>& info, int first, int rows, int g, int q, float (&x)[kQuarter]) {
  float weight[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) weight[h] = __uint_as_float(ptx::load_shared_4(info.weights() + (first + g + h * 8) * 4));
#pragma unroll
  for (int j = 0; j < kBlockRows / 8; ++j) {
    const PairFactors f(p, info, rows + j * 8 + 2 * q);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[4 * j + i] = fmaf(x[4 * j + i] * f.scale[i % 2], weight[i / 2], f.bias[i % 2]);
  }
  const auto gated = [&](auto activation) {  // octets 2 w are gates, 2 w + 1 ups
#pragma unroll
    for (int w = 0; w < kBlockRows / 16; ++w)
#pragma unroll
      for (int i = 0; i < 4; ++i) x[4 * w + i] = activation(x[8 * w + i], x[8 * w + 4 + i]);
  };
  if (p.activation == Activation::kSwiglu) {
    gated([&](float gate, float up) { return swiglu(gate, up, p.alpha, p.beta, p.limit); });
  } else if (p.activation == Activation::kGeluTanh) {
    gated([](float gate, float up) { return gelu_tanh(gate) * up; });
  } else {
#pragma unroll
    for (int i = 0; i < kQuarter; ++i) {
      const float r = ptx::max_nan(x[i], 0.0f);
      x[i] = r * r;
    }
  }
}

// Largest magnitude of a token (h: g or g + 8) among the first Values of a quarter.
template <int Values>
__device__ __forceinline__ float largest_of(const float (&x)[kQuarter], int h) {
  float m = 0.0f;
#pragma unroll
  for (int j = 0; j < Values; j += 4) m = ptx::max_nan(m, ptx::max_nan(fabsf(x[j + 2 * h]), fabsf(x[j + 2 * h + 1])));
  return m;
}

// Each lane of an even and odd pair has two bytes of token g and two of g + 8: the even one gets token g's four, the odd one the other's.
__device__ __forceinline__ uint32_t join_pair(uint32_t token_g, uint32_t token_g8, bool odd) {
  const uint32_t mine = odd ? token_g8 : token_g, theirs = __shfl_xor_sync(~0u, odd ? token_g : token_g8, 1);
  return odd ? theirs | mine << 16 : mine | theirs << 16;
}

// The up GEMM's: activations to e4m3, one scale a token and 128 channels. Those are both CTAs' where the activation is gated (64 channels each):
// corresponding warps, which have the same tokens, tell each other their largest magnitudes.
template <typename C>
__device__ __forceinline__ void store_pair_fp8(const GemmParams& p, const PairShared& s, const TileInfo<C>& info, const TokenTile& tile,
                                               int warpgroup, int blocks, int block0, int rank, Ring<1>& exchanges,
                                               float (&acc)[C::kBlocks][kPairValues]) {
  const int thread = ptx::opaque(threadIdx.x % 128), warp = thread / 32, lane = thread % 32, g = lane / 4, q = lane % 4;
  const int consumer = warpgroup * 4 + warp;
  const bool gated = ptx::uniform(is_gated(p.activation));
  const uint32_t amax = s.amax + consumer * C::kAmaxBytes + g * 4, full = s.amax_full + consumer * 8, empty = s.amax_empty + consumer * 8;
  const uint32_t their_amax = ptx::map_shared(amax, rank ^ 1), their_full = ptx::map_shared(full, rank ^ 1);
  if (gated) {
    if (lane == 0) ptx::mbarrier_arrive_expect_tx(full, blocks * 64);
    ptx::mbarrier_wait_warp(empty, exchanges.parity ^ 1);          // the other CTA has read what this one told it of the tile before
  }
  float largest[C::kBlocks][2];
#pragma unroll 1
  for (int quarter = 0; ptx::uniform(quarter < 2 * blocks); ++quarter) {
    float x[kQuarter];
    take_quarter<C>(acc, quarter, x);
    activate_pair<C>(p, info, pair_token(quarter / 2, warpgroup, warp), quarter % 2 * kBlockRows, g, q, x);
    if (gated) put_quarter<C, kQuarter / 2>(acc, quarter, x);
    else put_quarter<C, kQuarter>(acc, quarter, x);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float m = gated ? largest_of<kQuarter / 2>(x, h) : largest_of<kQuarter>(x, h);
#pragma unroll
      for (int d = 1; d < 4; d *= 2) m = ptx::max_nan(m, __shfl_xor_sync(~0u, m, d));
      if (quarter == 0) largest[0][h] = m;
      else if (quarter == 1) largest[0][h] = m = ptx::max_nan(largest[0][h], m);
      else if (quarter == 2) largest[1][h] = m;
      else largest[1][h] = m = ptx::max_nan(largest[1][h], m);
      if (gated && quarter % 2 && q == 0) ptx::store_async_4(their_amax + (quarter / 2 * 16 + h * 8) * 4, __float_as_uint(m), their_full);
    }
  }
  if (gated) ptx::mbarrier_wait_cluster(full, exchanges.parity);
  const int group = block0 / (gated ? 4 : 2), parts = gated ? 1 : 2;  // 32 values make eight bytes of every other 16
  const bool odd = q % 2;
#pragma unroll 1
  for (int part = 0; ptx::uniform(part < parts * blocks); ++part) {
    const int b = part / parts, half = part % parts, first = pair_token(b, warpgroup, warp);
    float x[kQuarter];
    take_quarter<C>(acc, 2 * b + half, x);
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float m = b == 0 ? largest[0][h] : largest[1][h];
      if (gated) m = ptx::max_nan(m, __uint_as_float(ptx::load_shared_4(amax + (b * 16 + h * 8) * 4)));
      const Fp8Scale scale = fp8_scale(m);
      factor[h] = scale.factor;
      const int token = first + g + h * 8;
      if (q == 0 && half == 0 && (!gated || rank == 0) && token < tile.count)
        p.out_scale[size_t(group) * p.scale_stride + tile.row + token] = scale.scale;
    }
    // K 8 i + 2 q .. of the group (fp8_place): 32 * (i % 4) + 16 * (q / 2) + 4 * (i / 4) + 2 * (q % 2).
    const auto octet = [&](int i) {
      uint32_t v[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) v[h] = to_fp8(x[4 * i + 2 * h] * factor[h], x[4 * i + 2 * h + 1] * factor[h]);
      return join_pair(v[0], v[1], odd);
    };
    const int token = first + g + (odd ? 8 : 0);
    uint8_t* out = static_cast<uint8_t*>(p.out) + size_t(tile.row + token) * p.out_stride + group * kBlockK + q / 2 * 16 + (gated ? rank : half) * 8;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint2 v = make_uint2(octet(w), octet(w + 4));
      if (token < tile.count) *reinterpret_cast<uint2*>(out + w * 32) = v;
    }
  }
  if (gated) {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive_remote(ptx::map_shared(empty, rank ^ 1));
    exchanges.next();
  }
}

}  // namespace vllm_humming::gemm
