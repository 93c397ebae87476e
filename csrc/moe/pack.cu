// SPDX-License-Identifier: Apache-2.0
#include "pack.h"

namespace vllm_humming {
namespace {

constexpr int kThreads = 256;  // one for each four words of a chunk's codes
constexpr int kLanes = 32;

// Where the eight codes of a word lie in it, by byte (two codes: even k, odd k) of those that the word takes: the places of a code's four bits,
// low first, the last one the sign. vllm_humming/moe/codes.py has the same tables.
struct WordLayout {
  int bits[4][2][4];
};
constexpr WordLayout kWordLayouts[] = {
    // bf16
    {{{{6, 7, 8, 15}, {22, 23, 24, 31}}, {{3, 4, 5, 12}, {19, 20, 21, 28}}, {{0, 1, 2, 9}, {16, 17, 18, 25}}, {{13, 14, 10, 11}, {29, 30, 26, 27}}}},
    // fp16
    {{{{9, 10, 11, 15}, {25, 26, 27, 31}}, {{6, 7, 8, 12}, {22, 23, 24, 28}}, {{3, 4, 5, 14}, {19, 20, 21, 30}}, {{0, 1, 2, 13}, {16, 17, 18, 29}}}},
    // e4m3
    {{{{0, 1, 2, 7}, {4, 5, 6, 15}}, {{8, 9, 10, 23}, {12, 13, 14, 31}}, {{16, 17, 18, 3}, {20, 21, 22, 11}}, {{24, 25, 26, 19}, {28, 29, 30, 27}}}},
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
      const auto& at = kLayout.bits[i][n];
      // Neighbouring bits move together.
      if (at[1] == at[0] + 1 && at[2] == at[0] + 2) word |= (code & 7) << at[0];
      else word |= (code & 3) << at[0] | (code >> 2 & 1) << at[2];
      word |= (code >> 3 & 1) << at[3];
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

// How an activation dtype holds e8m0 scales; vllm_humming/moe/scales.py, Window. A row's largest exponent s - b is at most kHighest.
struct Window {
  int offset, lowest;
};
template <int Layout>
constexpr Window kWindow = Layout == 1 ? Window{14 + 15, -23} : Window{126 + 127, -132};
constexpr int kHighest = 1, kBias = 127;
// MXFP4 for FP8 tokens: exponents s - b of groups; vllm_humming/moe/fp8.py.
constexpr int kFp8Lowest = -5, kFp8Highest = 6, kDepths = 5;

// Codes of e2m1 magnitudes 2^depth times as small, to nearest even: nibble m of entry `depth` is that of magnitude code m.
__device__ __forceinline__ uint32_t rounded_magnitude(uint32_t magnitude, int depth) {
  constexpr uint32_t kRounded[kDepths + 1] = {0x76543210, 0x54322100, 0x32211000, 0x21100000, 0x10000000, 0};
  uint32_t row = 0;
#pragma unroll
  for (int i = 0; i < kDepths; ++i) row = depth == i ? kRounded[i] : row;
  return row >> (4 * magnitude) & 7;
}
__device__ __forceinline__ uint32_t rounded_byte(uint32_t byte, int depth) {
  return (byte & 0x88) | rounded_magnitude(byte & 7, depth) | rounded_magnitude(byte >> 4 & 7, depth) << 4;
}

__device__ __forceinline__ int twice_e2m1(uint32_t magnitude) { return int(0xC8643210u >> (4 * magnitude) & 15); }
__device__ __forceinline__ double power_of_two(int e) { return __longlong_as_double(int64_t(e + 1023) << 52); }  // normal numbers

// 2^b as float, subnormal ones included, and back.
__device__ __forceinline__ float float_power(int b) { return __uint_as_float(b >= -126 ? uint32_t(b + 127) << 23 : 1u << (b + 149)); }
__device__ __forceinline__ int exponent_of(float power) {
  const uint32_t bits = __float_as_uint(power);
  return bits >> 23 ? int(bits >> 23) - 127 : -118 - __clz(bits);
}

template <Format F>
__device__ __forceinline__ bool is_live(const uint8_t* codes) {
  constexpr uint64_t kMagnitudes = 0x7777777777777777;
  const uint64_t* words = reinterpret_cast<const uint64_t*>(codes);
  uint64_t any = words[0];
  if constexpr (group_k(F) == 32) any |= words[1];
  return any & kMagnitudes;
}

template <Format F>
__device__ __forceinline__ bool is_legal(uint32_t scale) {
  if constexpr (F == Format::kNvfp4) return (scale & 0x7F) != 0x7F && scale <= 0x80;
  return scale != 255;
}

__device__ __forceinline__ void note(const PackParams& p, Field field, int row, uint32_t detail) {
  atomicMin(reinterpret_cast<long long*>(p.record + field), static_cast<long long>(int64_t(row) << 32 | detail));
}

// What rounding does to a row whose exponents s - b leave e4m3's range below: groups that change, and the worst change.
__device__ void note_rounding(const PackParams& p, const uint8_t* codes, const uint8_t* scales, int groups, int b, int lane) {
  int changed = 0;
  double worst = 0, largest = 0;
  for (int group = lane; group < groups; group += kLanes) {
    if (!is_live<Format::kMxfp4Fp8>(codes + group * 16)) continue;
    const int d = scales[group] - kBias - b, depth = d < kFp8Lowest ? min(kFp8Lowest - d, kDepths) : 0;
    int change = 0, magnitude = 0;  // twice the values, in units of the group's scale
    for (int i = 0; i < 32; ++i) {
      const uint32_t code = codes[group * 16 + i / 2] >> (4 * (i % 2)) & 7;
      magnitude = max(magnitude, twice_e2m1(code));
      change = max(change, abs((twice_e2m1(rounded_magnitude(code, depth)) << depth) - twice_e2m1(code)));
    }
    largest = fmax(largest, 0.5 * magnitude * power_of_two(d));
    worst = fmax(worst, 0.5 * change * power_of_two(d));
    changed += change > 0;
  }
  for (int i = kLanes / 2; i; i /= 2) {
    changed += __shfl_xor_sync(~0u, changed, i);
    largest = fmax(largest, __shfl_xor_sync(~0u, largest, i));
    worst = fmax(worst, __shfl_xor_sync(~0u, worst, i));
  }
  if (lane || !changed) return;
  atomicAdd(reinterpret_cast<unsigned long long*>(p.record + kRoundedGroups), static_cast<unsigned long long>(changed));
  atomicMax(reinterpret_cast<long long*>(p.record + kWorstChange), __double_as_longlong(worst / largest));  // in the numbers' order
}

// A warp a checkpoint row: its scale, and what is wrong with it.
template <Format F, int Layout>
__global__ void __launch_bounds__(kThreads) inspect(const __grid_constant__ PackParams p) {
  const int row = blockIdx.x * (kThreads / kLanes) + threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  if (row >= p.rows_in) return;
  const int groups = p.k_in / group_k(F);
  const uint8_t* codes = p.codes + int64_t(row) * (p.k_in / 2);
  const uint8_t* scales = p.scales + int64_t(row) * groups;
  int lowest = 1000, highest = -1000, illegal = groups;
  for (int group = lane; group < groups; group += kLanes) {
    const int scale = scales[group];
    if (!is_legal<F>(scale)) illegal = min(illegal, group);
    if constexpr (F != Format::kNvfp4) {
      if (!is_live<F>(codes + group * (group_k(F) / 2))) continue;
      lowest = min(lowest, scale - kBias);
      highest = max(highest, scale - kBias);
    }
  }
  for (int i = kLanes / 2; i; i /= 2) {
    illegal = min(illegal, __shfl_xor_sync(~0u, illegal, i));
    lowest = min(lowest, __shfl_xor_sync(~0u, lowest, i));
    highest = max(highest, __shfl_xor_sync(~0u, highest, i));
  }
  float row_scale;
  if constexpr (F == Format::kNvfp4) {
    const float global = p.global_scale[row * p.global_stride];
    row_scale = global * 512.f;  // packed scales are 2^9 too small
    if (lane == 0 && !(isfinite(row_scale) && row_scale >= 0x1p-126f)) note(p, kBadGlobal, row, __float_as_uint(global));
  } else {
    const bool any = highest > -1000;
    int b = 0;
    if constexpr (F == Format::kMxfp4Fp8) {
      b = any ? highest - kFp8Highest : 0;
      if (any && lowest - b < kFp8Lowest) note_rounding(p, codes, scales, groups, b, lane);
    } else {
      constexpr Window kHolds = kWindow<Layout>;
      if (any && (highest > kHighest || lowest < kHolds.lowest)) b = highest - kHighest;
      if (lane == 0 && any && lowest - b < kHolds.lowest) note(p, kOutsideWindow, row, uint32_t(lowest + kBias) << 8 | uint32_t(highest + kBias));
    }
    row_scale = float_power(b);
  }
  if (lane) return;
  if (illegal < groups) note(p, kBadScale, row, uint32_t(illegal) << 8 | scales[illegal]);
  if (p.bias && !isfinite(p.bias[row])) note(p, kBadBias, row, 0);
  p.row_scale[row] = row_scale;
}

// The packed byte of a live group's scale, and what is done to its codes: 0 nothing, -1 all become zero, otherwise they are rounded so deep.
template <Format F, int Layout>
__device__ __forceinline__ uint32_t packed_scale(uint32_t scale, int b, int& depth) {
  depth = 0;
  if constexpr (F == Format::kNvfp4) {
    const uint32_t exponent = scale >> 3 & 15, mantissa = scale & 7;
    if (exponent) return (exponent + 13) << 3 | mantissa;
    const int top = 31 - __clz(mantissa | 1);  // subnormal: mantissa * 2^-9
    return uint32_t(top + 11) << 3 | (mantissa << (3 - top) & 7);
  } else if constexpr (F == Format::kMxfp4Fp8) {
    const int d = int(scale) - kBias - b;
    if (d < kFp8Lowest) depth = min(kFp8Lowest - d, kDepths);
    return uint32_t(max(d, kFp8Lowest) - kFp8Lowest) * 8;
  } else {
    return uint32_t(int(scale) - kBias - b + kWindow<Layout>.offset);
  }
}

// A CTA a chunk, unless something is refused. F's group size and code layout; Layout: index into kWordLayouts.
template <Format F, int Layout>
__global__ void __launch_bounds__(kThreads) pack(const __grid_constant__ PackParams p) {
  constexpr int kGroups = kBlockK / group_k(F);
  __shared__ int8_t depths[kBlockRows * kGroups];  // [row 64][group]
  for (Field field : {kBadScale, kBadBias, kBadGlobal, kOutsideWindow})
    if (p.record[field] != kNothingFound) return;
  const int block = blockIdx.y, chunk = blockIdx.x;
  uint8_t* out = p.packed + (int64_t(block) * p.k_blocks + chunk) * chunk_bytes(F);

  for (int i = threadIdx.x; i < kBlockRows * kGroups; i += kThreads) {  // [w 4][g 8][half 2][group]
    const int group = i % kGroups, half = i / kGroups % 2, row = i / (kGroups * 16) * 16 + half * 8 + i / (kGroups * 2) % 8;
    const int from = source_row(p, block * kBlockRows + row);
    const int at = chunk * kGroups + group, groups_in = p.k_in / group_k(F);
    uint32_t packed = p.zero_group;
    int depth = 0;
    if (from >= 0 && at < groups_in) {
      const uint32_t scale = p.scales[int64_t(from) * groups_in + at];
      // a zero scale is no packed one: its codes become zero
      if (F == Format::kNvfp4 && (scale & 0x7F) == 0) depth = -1;
      else if (is_live<F>(p.codes + (int64_t(from) * groups_in + at) * (group_k(F) / 2))) {
        packed = packed_scale<F, Layout>(scale, F == Format::kNvfp4 ? 0 : exponent_of(p.row_scale[from]), depth);
      }
    }
    out[kCodeBytes + i] = uint8_t(packed);
    depths[row * kGroups + group] = int8_t(depth);
  }
  if (chunk == 0 && threadIdx.x < kBlockRows) {
    const int to = block * kBlockRows + threadIdx.x, from = source_row(p, to);
    p.packed_row_scale[to] = from >= 0 ? p.row_scale[from] : 1.0f;
    if (p.packed_bias) p.packed_bias[to] = from >= 0 ? p.bias[from] : 0.0f;
  }
  __syncthreads();

  const int half_k = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  const int in_block = warp * 16 + g, row = block * kBlockRows + in_block;
  const int source[2] = {source_row(p, row), source_row(p, row + 8)};
  // The codes of K index k and the next, of the thread's row `half`.
  auto byte_at = [&](int half, int k) -> uint32_t {
    const int depth = F == Format::kMxfp4 ? 0 : depths[(in_block + 8 * half) * kGroups + k / group_k(F)];
    k += chunk * kBlockK;
    if (source[half] < 0 || k >= p.k_in || depth < 0) return 0;
    const uint32_t byte = p.codes[int64_t(source[half]) * (p.k_in / 2) + k / 2];
    return depth ? rounded_byte(byte, depth) : byte;
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
}

template <Format F, int Layout>
void launch(int64_t row_blocks, const PackParams& p, cudaStream_t stream) {
  constexpr int kRows = kThreads / kLanes;
  inspect<F, Layout><<<(p.rows_in + kRows - 1) / kRows, kThreads, 0, stream>>>(p);
  check(cudaGetLastError(), "launch inspect");
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
