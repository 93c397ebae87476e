// SPDX-License-Identifier: Apache-2.0
// What the host side of all operators shares: the carving of workspaces, tiles, and both GEMMs of a layer's experts.
#pragma once
#include "launch.h"

namespace vllm_humming {

constexpr int64_t kAlign = 256;
constexpr int64_t aligned(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }
constexpr int64_t blocks(int64_t n, int64_t size) { return (n + size - 1) / size; }

// Elements of tokens that a gathering GEMM can address: 32 bits, in units of 16 bytes.
constexpr int64_t kMostGathered = int64_t(1) << 35;

// Offsets of the parts of a workspace, one behind the other.
struct Carver {
  int64_t at = 0;
  int64_t take(int64_t size) {
    const int64_t offset = at;
    at += aligned(size);
    return offset;
  }
};

// Most token tiles that `rows` rows of `experts` experts can form, with tiles whose widest width is `widest`.
int64_t most_token_tiles(int64_t widest, int64_t rows, int64_t experts);
const Tile& tile_for(Format format, int64_t index);  // throws for a tile of the other path

struct Projection {
  const uint8_t* packed;
  const float* row_scale;
  const float* bias;  // or null
};

// The experts of a layer.
struct Experts {
  int64_t experts, hidden, intermediate;  // intermediate: padded, a multiple of 128
  DType dtype;                            // of what the GEMMs put out (h of 16-bit formats, out)
  Format format;
  Projection up, down;
  Activation activation;
  float alpha, beta, limit;
  int64_t tile_up, tile_down;
  bool fp8() const { return fp8_tokens(format); }
  int64_t up_rows() const { return intermediate * (is_gated(activation) ? 2 : 1); }  // weight rows of the up GEMM
};

// The rows they run on, and what the kernels ahead have made of them.
struct ExpertRows {
  int64_t rows, used;                            // at most; about how many of them have an expert
  const void* x;                                 // gathering tiles: [tokens, hidden]; else [rows, hidden]; FP8: e4m3 [rows, whole blocks]
  const float* x_scale;                          // FP8: [blocks, rows]
  void* h;                                       // [rows, intermediate]
  float* h_scale;                                // FP8: [blocks, rows]
  void* out;                                     // [slots, hidden]
  const int* slots;                              // or null: slot = row, top_k = 1
  const float *weight_on_input, *weight_on_output;  // [rows], or null; few entries: [slots]
  int64_t top_k;
  FewEntries few;                                // topk_ids null: the lists say what there is, or FusedRows
  TileLists* lists;                              // null for few entries, as are tiles and slots
  const TokenTile* tiles[2];
  bool lists_are_new;                            // made by the kernel just ahead of the up GEMM
};
void launch_experts(const Experts&, const ExpertRows&, cudaStream_t);

// What else a kernel that runs both GEMMs needs.
struct FusedRows {
  FewEntries few;                                // topk_ids null: the lists say what there is
  int *next, *ready;                             // FusedCounters
};
// The same by one kernel: both GEMMs with tile_up, which is tile_down, on the token tiles of the first list.
void launch_fused(const Experts&, const ExpertRows&, const FusedRows&, cudaStream_t);

}  // namespace vllm_humming
