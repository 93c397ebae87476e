// SPDX-License-Identifier: Apache-2.0
// Host side of the kernels: launches, the tile table, errors. Knows nothing of torch.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>
#include <cuda.h>
#include <cuda_runtime.h>
#include "../mma/chunk.h"
#include "params.h"

namespace vllm_humming {

inline void check(cudaError_t e, const char* what) {
  if (e == cudaSuccess) return;
  cudaGetLastError();  // or the next check would report this one again
  std::string hint = e == cudaErrorInsufficientDriver ? " (the driver must support the CUDA major version of the nvcc that built the kernels)" : "";
  throw std::runtime_error(std::string("vllm_humming: could not ") + what + ": " + cudaGetErrorString(e) + hint);
}

// Launches with programmatic stream serialization: the kernel starts early and waits with griddepcontrol.wait. Cluster: CTAs a cluster.
template <int Cluster = 1, typename... Args>
void launch(void (*kernel)(Args...), dim3 grid, int threads, int shared, cudaStream_t stream, const Args&... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {Cluster, 1, 1};
  config.attrs = attributes;
  config.numAttrs = Cluster > 1 ? 2 : 1;
  check(cudaLaunchKernelEx(&config, kernel, args...), "launch a kernel");
}

// Of the current device.
inline int multiprocessors() {
  int device = 0, count = 0;
  check(cudaGetDevice(&device), "read the current device");
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "read the multiprocessor count");
  return count;
}

enum class DType : int { kBf16 = 0, kFp16 = 1 };
enum class TokenType : int { kBf16 = 0, kFp16 = 1, kFp8 = 2 };
constexpr TokenType token_type(DType d) { return d == DType::kBf16 ? TokenType::kBf16 : TokenType::kFp16; }

// Tensor map of a row-major [rows, columns] token matrix: boxes of box_rows x 128 bytes, 128-byte swizzle. stride: elements.
CUtensorMap token_map(TokenType type, const void* data, int64_t rows, int64_t columns, int64_t stride, int box_rows);

// No tile's widest token width is less, and no expert has more tiles than it takes of the widest: bounds the tile lists in the workspace.
constexpr int kLeastWidest = 8;

// Most entries of a layer whose GEMMs run in one kernel: of the one-CTA routing, which zeroes that kernel's counters.
constexpr int64_t kMostFusedEntries = 4096;

// The activations a tile is compiled for.
enum class Path : int { kA16 = 0, kFp8 = 1 };
constexpr Path path_of(Format f) { return fp8_tokens(f) ? Path::kFp8 : Path::kA16; }

// One compiled tile. `launch` sizes the grid by the most tiles there can be.
struct Tile {
  Path path;
  WidthList widths;
  int blocks, ctas, stages, threads, shared_bytes;
  bool sorted_tokens;  // the up GEMM, in a kernel of its own, reads a sorted copy of the tokens instead of gathering them
  bool few_entries;    // one kernel for both GEMMs gathers all tokens, and runs layers of few entries without a routing kernel: few_entries.cuh;
  bool few_apart;      // and so do two kernels
  // x_rows: rows that p.x holds, where it is read by tensor copies.
  void (*launch)(Format, DType, Stage, const GemmParams& p, int64_t x_rows, int64_t most_tiles, cudaStream_t);
  // Both GEMMs in one kernel: fused.cuh. Null where the tile has none.
  void (*launch_fused)(Format, DType, const FusedParams& p, int64_t x_rows, int64_t most_tiles, cudaStream_t);
  int cycles[WidthList::kMost];  // tiles.cpp
};
const Tile& tile_at(int64_t index);  // throws std::out_of_range
int64_t tile_total();

int route_blocks(int64_t entries);
void launch_route(const RouteParams&, cudaStream_t);
// The sorted copy where launch_route has made the rows; or, where sorting_makes_rows, both at once behind the tile lists alone.
void launch_tile_lists(const RouteParams&, cudaStream_t);
bool sorting_makes_rows(int64_t entries, int64_t columns);
void launch_sort(const void* x, void* sorted, const RouteParams&, int64_t columns, cudaStream_t);
void launch_permute(const void* x, void* sorted, const RowList&, int64_t columns, cudaStream_t);
// The counters of a layer of few entries, zero when the stream comes to it: the layer's reduction zeroes them again (ReduceParams::counters).
FusedCounters<kMostFewEntries>* few_counters(cudaStream_t stream);
void launch_group_tiles(const GroupParams&, cudaStream_t);
void launch_quantize(TokenType, const QuantizeParams&, cudaStream_t);
void launch_reduce(DType, const ReduceParams&, cudaStream_t);

}  // namespace vllm_humming
