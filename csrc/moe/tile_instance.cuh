// SPDX-License-Identifier: Apache-2.0
// Compiles one tile configuration: both stages, both activation dtypes, the formats of its path. One translation unit each, so that they
// build in parallel.
#pragma once
#include <algorithm>
#include <limits>
#include "fused.cuh"
#include "gemm.cuh"
#include "launch.h"
#include "pair/pair_gemm.cuh"

namespace vllm_humming {

template <typename C>
CUtensorMap map_of(const GemmParams& p, DType dtype, int64_t x_rows) {
  return token_map(C::kFp8 ? TokenType::kFp8 : token_type(dtype), p.x, x_rows, p.x_columns, p.x_stride, C::kBoxRows);
}

template <typename T>
constexpr DType kDtype = std::is_same_v<T, __half> ? DType::kFp16 : DType::kBf16;

inline void check_tiles(int64_t tiles, int64_t grid) {
  if (tiles > std::numeric_limits<int>::max() - grid) throw std::runtime_error("vllm_humming: too many rows and columns: more than 2^31 tiles");
}

template <typename T, typename C>
void launch_fused(const FusedParams& p, int64_t x_rows, int64_t most_tiles, cudaStream_t stream) {
  auto* kernel = &gemm::fused_kernel<T, C>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes), "reserve shared memory");
  CUtensorMap maps[2] = {};
  if constexpr (!C::kFusedGathers) {
    for (int i = 0; i < 2; ++i) maps[i] = map_of<C>(p.gemm[i], kDtype<T>, x_rows);
  }
  const int64_t grid = std::min(most_tiles, int64_t(multiprocessors()) * C::kCtas);
  check_tiles(most_tiles, grid);
  launch(kernel, int(grid), C::kThreads, C::kSharedBytes, stream, p, maps[0], maps[1]);
}

template <typename T, typename C, Stage S>
void launch_gemm(const GemmParams& p, int64_t x_rows, int64_t most_tiles, cudaStream_t stream) {
  constexpr int kCluster = C::kCluster;
  auto* kernel = [] {
    if constexpr (kCluster > 1) return &gemm::pair_kernel<T, C, S>;
    else return &gemm::kernel<T, C, S>;
  }();
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes), "reserve shared memory");
  CUtensorMap map = {};
  if constexpr (!gemm::kGathers<C, S> && !C::kTokenRows) map = map_of<C>(p, kDtype<T>, x_rows);
  int64_t at_once = int64_t(multiprocessors()) * C::kCtas / kCluster;
  if constexpr (kCluster > 1) {
    // The first CTA tells the second its tiles through two mailboxes. It may be a ring of stages ahead, so a tile must be longer; else one tile a
    // cluster.
    if (p.k_blocks <= C::kStages) at_once = most_tiles;
  }
  const int64_t grid = std::min(most_tiles, at_once) * kCluster;
  check_tiles(most_tiles, grid);
  launch<kCluster>(kernel, int(grid), C::kThreads, C::kSharedBytes, stream, p, map);
}

// Config<F>: the tile's configuration for a weight format. Each tile's has a name of its own: it is part of the linker's name of launch().
template <template <Format> class Config, Path P>
struct TileInstance {
  static constexpr Format kAnyFormat = P == Path::kFp8 ? Format::kMxfp4Fp8 : Format::kMxfp4;

  template <typename C>
  static void launch_format(DType dtype, Stage stage, const GemmParams& p, int64_t x_rows, int64_t most_tiles, cudaStream_t stream) {
    static_assert(C::kSharedBytes <= 227 * 1024, "tile exceeds the shared memory of a block");
    static_assert(C::kCtas * (C::kSharedBytes + 1024) <= 228 * 1024, "tiles exceed the shared memory of an SM");
    if (stage == Stage::kUp && (dtype == DType::kBf16 || C::kFp8)) {  // e4m3 in and out
      launch_gemm<__nv_bfloat16, C, Stage::kUp>(p, x_rows, most_tiles, stream);
    } else if (stage == Stage::kUp) {
      if constexpr (!C::kFp8) launch_gemm<__half, C, Stage::kUp>(p, x_rows, most_tiles, stream);
    } else if (dtype == DType::kBf16) {
      launch_gemm<__nv_bfloat16, C, Stage::kDown>(p, x_rows, most_tiles, stream);
    } else {
      launch_gemm<__half, C, Stage::kDown>(p, x_rows, most_tiles, stream);
    }
  }
  static void launch(Format format, DType dtype, Stage stage, const GemmParams& p, int64_t x_rows, int64_t most_tiles, cudaStream_t stream) {
    if constexpr (P == Path::kFp8) {
      launch_format<Config<Format::kMxfp4Fp8>>(dtype, stage, p, x_rows, most_tiles, stream);
    } else {
      if (format == Format::kMxfp4) launch_format<Config<Format::kMxfp4>>(dtype, stage, p, x_rows, most_tiles, stream);
      else launch_format<Config<Format::kNvfp4>>(dtype, stage, p, x_rows, most_tiles, stream);
    }
  }
  static void launch_both(Format format, DType dtype, const FusedParams& p, int64_t x_rows, int64_t most_tiles, cudaStream_t stream) {
    if constexpr (Config<kAnyFormat>::kFused) {
      using Mx = Config<Format::kMxfp4>;
      using Nv = Config<Format::kNvfp4>;
      const bool mx = format == Format::kMxfp4, half = dtype == DType::kFp16;
      auto* launch_it = mx ? half ? &launch_fused<__half, Mx> : &launch_fused<__nv_bfloat16, Mx>
                           : half ? &launch_fused<__half, Nv> : &launch_fused<__nv_bfloat16, Nv>;
      launch_it(p, x_rows, most_tiles, stream);
    }
  }
  static constexpr Tile tile() {
    using C = Config<kAnyFormat>;
    static_assert(C::W::kCount <= WidthList::kMost);
    static_assert(C::kMaxWidth >= kLeastWidest, "the workspace holds fewer token tiles than this one may need");
    WidthList widths = {C::W::kCount, {}};
    for (int i = 0; i < C::W::kCount; ++i) widths.at[i] = C::W::kAt[i];
    constexpr int kBlocks = C::kTileBlocks * C::kCluster;
    constexpr bool kSorted = C::kUpTokens == Tokens::kSorted;
    return {P,       widths, kBlocks, C::kCtas, C::kStages, C::kThreads, C::kSharedBytes, kSorted, C::kFew, C::kFewApart,
            &launch, C::kFused ? &launch_both : nullptr};
  }
};

}  // namespace vllm_humming
