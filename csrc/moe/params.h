// SPDX-License-Identifier: Apache-2.0
// What the kernels share. Rows: routed (token, k) pairs sorted by expert, slot = token * top_k + k; or rows that the caller has put in groups.
#pragma once
#include <cstdint>
#include <cuda_runtime.h>
#include "cut.h"

namespace vllm_humming {

enum class Activation : int { kSwiglu = 0, kGeluTanh = 1, kRelu2 = 2, kNone = 3 };  // kNone: of gathering up GEMMs alone
__host__ __device__ constexpr bool is_gated(Activation a) { return a < Activation::kRelu2; }
enum class Stage : int { kUp = 0, kDown = 1 };  // which GEMM of the layer

constexpr int kMostExperts = 1024;  // local ones

// One token tile of one expert: rows [row, row + count), computed `width` tokens wide.
struct __align__(16) TokenTile {
  int expert, row, count, width;
};

// A layer of so few entries (tokens * top_k) that its GEMMs may route by themselves: few_entries.cuh; layer.cpp has the whole rule.
constexpr int kMostFewEntries = 64;
struct FewEntries {
  const int* topk_ids;        // [entries]; null: not such a layer
  const int* expert_map;      // [global_experts] or null
  int entries, global_experts, local_experts;
  int* next_down;             // two kernels: the down GEMM's next_tile; the up GEMM zeroes it
};

struct GemmParams {
  const uint8_t* packed;      // [E, row_blocks, k_blocks, chunk_bytes of the format]
  const float* row_scale;     // [E, row_blocks * 64]
  const float* bias;          // the same, or null
  const void* x;              // [tokens, x_stride] where gathered, else [rows, x_stride]
  void* out;                  // kUp: [rows, out_stride]; kDown: [slots, out_stride]
  const TokenTile* tiles;     // or null: one expert with all of `rows`, of which each CTA works its tiles out (down GEMM only)
  const int* tile_count;
  int* next_tile;             // zero at the start: (token tile, column tile) pairs that CTAs have taken beyond their first
  const int* slots;           // [rows] slot of a row; null: slot = row
  const float* row_weight;    // [rows] router weight, or null; few entries: [entries], by slot
  FewEntries few;             // instead of tiles, tile_count and slots
  int row_blocks, k_blocks;
  int x_columns, x_stride;    // valid columns of x (the rest of K reads as zero)
  int out_columns, out_stride;
  int top_k;
  int column_tiles;           // weight-row tiles: ceil(row_blocks / blocks a tile)
  int rows;                   // where there is no list
  Cut cut;                    // the same: of `rows`
  bool list_is_new;           // the kernel just ahead makes the tile list
  int evict_first;            // weights are read once: keep them out of L2's way
  Activation activation;
  float alpha, beta, limit;
  // FP8 tokens. x and the up GEMM's out are e4m3 then, strides in bytes; scales are fp32 [K / 128, scale_stride], rows along the second
  // dimension, so that a tile's scales of one stage lie together.
  const float* x_scale;
  float* out_scale;           // kUp
  int scale_stride;
};

// What a kernel that runs both GEMMs of a layer counts; zero at its start.
template <int Tiles>
struct FusedCounters {
  int next;                   // tiles taken, of the up and then of the down GEMM
  int ready[Tiles];           // by token tile: how many column tiles of its h are stored
};

// Both GEMMs of a layer in one kernel, on the same token tiles: fused.cuh. gemm[1].x is gemm[0].out.
struct FusedParams {
  GemmParams gemm[2];         // up, down
  FewEntries few;             // or gemm[0] has a tile list; not gemm[i].few
  int *next, *ready;          // FusedCounters
};

// Lengths of what the routing makes, and the GEMMs' cursors into it.
struct TileLists {
  int tiles[2];               // token tiles of the up and the down GEMM
  int next[2];                // GemmParams::next_tile of each; where one kernel runs both, the first is FusedCounters::next
  int rows;
};

// Where tile lists go.
struct TileOutput {
  TileLists* lists;
  TokenTile* tiles[2];
  WidthList widths[2];        // of the up and the down GEMM's tile
};

struct RouteParams : TileOutput {
  const int* topk_ids;        // [entries], entries = tokens * top_k
  const float* topk_weights;  // [entries]
  const int* expert_map;      // [global_experts] or null
  int entries, top_k, global_experts, local_experts;
  int* slots;                 // [entries]
  float* row_weight;          // [entries]
  int* row_of_slot;           // [entries] the row of a slot, negative where it has none; or null: not wanted
  int* counts;                // [local_experts + 1] scratch: counts, then a ticket
  int* block_base;            // [blocks, local_experts] scratch of the large path
  int* ready;                 // FusedCounters::ready to be zeroed, or null
  int most_tiles;             // its length
};

// Tile lists of rows that the caller has put in groups.
struct GroupParams : TileOutput {
  const int* groups;          // offsets [experts + 1]; or, where rows_each is positive, counts [experts], expert e's rows from e * rows_each
  int experts, rows, rows_each;
  int gemms;                  // tile lists to make: 1 or 2
};

// Which rows a kernel makes, and of what: row r of token slots[r] / top_k.
struct RowList {
  const int* slots;           // [rows], or null: slot = row and top_k = 1
  const int *begin, *end;     // device: the first row and behind the last, or null: 0 and `rows`
  int rows, top_k;
};

struct QuantizeParams {
  const void* x;              // [tokens, columns], 16 bits wide or e4m3
  void* out;                  // e4m3 [rows, columns rounded up to 128]
  float* scale;               // [columns / 128, scale_stride]
  RowList list;
  const int* counts;          // device: how many of each rows_each rows there are, or null: all
  int columns, scale_stride;
  const int* row_of_slot;     // RouteParams': tokens go each to its rows, and of `list` counts only how many slots there are; or null: by rows
  bool sparse;                // there: many tokens may have no row
  // e4m3 tokens: the scale of token t and group g is x_scale[t / rows_each * strides[0] + t % rows_each * strides[1] + g * strides[2]].
  const float* x_scale;
  int64_t x_scale_strides[3];
  int rows_each;              // where there are counts or scales
};

struct ReduceParams {
  const void* y;              // [tokens * top_k, columns]
  void* out;                  // [tokens, columns]
  const int* topk_ids;
  const int* expert_map;
  int tokens, top_k, columns, global_experts, local_experts;
  FusedCounters<kMostFewEntries>* counters;  // zeroed for their next user, or null
};

}  // namespace vllm_humming
