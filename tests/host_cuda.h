// SPDX-License-Identifier: Apache-2.0
// What csrc/moe/pack.cu needs of CUDA, on the host: every thread of a launch runs after the other. A warp has one lane (test_pack_kernels.py), so
// shuffles return what they are given; a kernel that shares memory runs twice and finds it filled the second time.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(threads)
#define __shared__ static

struct dim3 {
  unsigned x, y;
  dim3(unsigned x, unsigned y = 1) : x(x), y(y) {}
};
static dim3 blockIdx(0, 0), threadIdx(0, 0);
struct uint4 {
  uint32_t x, y, z, w;
};
static uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
using cudaStream_t = void*;
static int cudaGetLastError() { return 0; }
using std::isfinite, std::max, std::min;

template <typename To, typename From>
To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}
static double __longlong_as_double(int64_t v) { return same_bits<double>(v); }
static long long __double_as_longlong(double v) { return same_bits<long long>(v); }
static float __uint_as_float(uint32_t v) { return same_bits<float>(v); }
static uint32_t __float_as_uint(float v) { return same_bits<uint32_t>(v); }
static int __clz(uint32_t v) { return v ? __builtin_clz(v) : 32; }
template <typename T>
T __shfl_xor_sync(uint32_t, T v, int) { return v; }
static void __syncthreads() {}
template <typename T>
void atomicMin(T* p, T v) { *p = min(*p, v); }
template <typename T>
void atomicMax(T* p, T v) { *p = max(*p, v); }
template <typename T>
void atomicAdd(T* p, T v) { *p += v; }

template <typename Kernel>
void run(dim3 grid, int threads, int times, Kernel kernel) {
  for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y)
    for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x)
      for (int time = 0; time < times; ++time)
        for (threadIdx.x = 0; threadIdx.x < unsigned(threads); ++threadIdx.x) kernel();
}

namespace vllm_humming {
enum class DType : int { kBf16 = 0, kFp16 = 1 };
static void check(int, const char*) {}
}  // namespace vllm_humming
