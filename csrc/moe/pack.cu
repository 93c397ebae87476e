// SPDX-License-Identifier: Apache-2.0
#include "pack.h"

namespace vllm_humming {
namespace {

constexpr int kThreads = 256;  // one for each four words of a chunk's codes

// Where the eight codes of a word lie in it, by byte (two codes: even k, odd k) of those that the word takes: the lowest magnitude bit and
// the sign bit. vllm_humming/moe/codes.py has the same tables.
struct WordLayout {
  int magnitude[4][2], sign[4][2];
};
constexpr WordLayout kWordLayouts[] = {
    {{{6, 22}, {3, 19}, {0, 16}, {9, 25}}, {{15, 31}, {12, 28}, {14, 30}, {13, 29}}},  // bf16
    {{{9, 25}, {6, 22}, {3, 19}, {0, 16}}, {{15, 31}, {12, 28}, {14, 30}, {13, 29}}},  // fp16
    {{{0, 4}, {8, 12}, {16, 20}, {24, 28}}, {{7, 15}, {23, 31}, {3, 11}, {19, 27}}},   // e4m3
};

template <int Layout>
__device__ __forceinline__ uint32_t word_of(const uint32_t (&bytes)[4]) {
  constexpr WordLayout kLayout = kWordLayouts[Layout];
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint32_t code = bytes[i] >> (4 * n);
      word |= (code & 7) << kLayout.magnitude[i][n] | (code >> 3 & 1) << kLayout.sign[i][n];
    }
  return word;
}

// Row of the checkpoint at packed row `row`, or -1.
__device__ __forceinline__ int source_row(const PackParams& p, int row) {
  if (!p.gated) return row < p.rows_in ? row : -1;
  const int channels = p.rows_in / 2, half = row / 8 % 2, channel = row / 16 * 8 + row % 8;
  if (channel >= channels) return -1;
  return p.interleaved ? 2 * channel + half : half * channels + channel;
}

// A CTA a chunk. F's group size and code layout; Layout: index into kWordLayouts.
template <Format F, int Layout>
__global__ void __launch_bounds__(kThreads) pack(const __grid_constant__ PackParams p) {
  constexpr int kGroups = kBlockK / group_k(F);
  const int block = blockIdx.y, chunk = blockIdx.x;
  uint8_t* out = p.packed + (int64_t(block) * p.k_blocks + chunk) * chunk_bytes(F);
  const int half_k = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  const int row = block * kBlockRows + warp * 16 + g;
  const int source[2] = {source_row(p, row), source_row(p, row + 8)};
  // The codes of K index k and the next, of the thread's row `half`.
  auto byte_at = [&](int half, int k) -> uint32_t {
    k += chunk * kBlockK;
    return source[half] >= 0 && k < p.k_in ? p.codes[int64_t(source[half]) * (p.k_in / 2) + k / 2] : 0;
  };
  uint32_t words[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint32_t bytes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (Layout == 2) bytes[i] = byte_at(j % 2, 32 * q + 8 * (2 * half_k + j / 2) + 2 * i);
      else bytes[i] = byte_at(i % 2, 64 * half_k + 16 * j + 8 * (i / 2) + 2 * q);
    }
    words[j] = word_of<Layout>(bytes);
  }
  *reinterpret_cast<uint4*>(out + threadIdx.x * 16) = make_uint4(words[0], words[1], words[2], words[3]);

  for (int i = threadIdx.x; i < kBlockRows * kGroups; i += kThreads) {  // [w 4][g 8][half 2][group]
    const int group = i % kGroups, half = i / kGroups % 2;
    const int from = source_row(p, block * kBlockRows + i / (kGroups * 16) * 16 + half * 8 + i / (kGroups * 2) % 8);
    const int at = chunk * kGroups + group, groups_in = p.k_in / group_k(F);
    out[kCodeBytes + i] = from >= 0 && at < groups_in ? p.scales[int64_t(from) * groups_in + at] : p.zero_group;
  }
  if (chunk == 0 && threadIdx.x < kBlockRows) {
    const int to = block * kBlockRows + threadIdx.x, from = source_row(p, to);
    p.packed_row_scale[to] = from >= 0 ? p.row_scale[from] : 1.0f;
    if (p.packed_bias) p.packed_bias[to] = from >= 0 ? p.bias[from] : 0.0f;
  }
}

template <Format F, int Layout>
void launch(int64_t row_blocks, const PackParams& p, cudaStream_t stream) {
  pack<F, Layout><<<dim3(p.k_blocks, unsigned(row_blocks)), kThreads, 0, stream>>>(p);
  check(cudaGetLastError(), "launch pack");
}

}  // namespace

void launch_pack(Format format, DType dtype, int64_t row_blocks, const PackParams& p, cudaStream_t stream) {
  const bool fp16 = dtype == DType::kFp16;
  if (format == Format::kMxfp4Fp8) launch<Format::kMxfp4Fp8, 2>(row_blocks, p, stream);
  else if (format == Format::kMxfp4) fp16 ? launch<Format::kMxfp4, 1>(row_blocks, p, stream) : launch<Format::kMxfp4, 0>(row_blocks, p, stream);
  else fp16 ? launch<Format::kNvfp4, 1>(row_blocks, p, stream) : launch<Format::kNvfp4, 0>(row_blocks, p, stream);
}

}  // namespace vllm_humming
