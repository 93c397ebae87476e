// SPDX-License-Identifier: Apache-2.0
// One projection, or a whole layer without routing, of tokens that the caller has put in groups: what grouped_ops.cpp validates and grouped.cpp
// runs.
#pragma once
#include "experts.h"

namespace vllm_humming {

enum class Layout : int { kContiguous = 0, kMasked = 1, kIndexed = 2 };

// The caller's tokens. x_scale_strides: of expert (kMasked), token and block of 128 channels, in elements.
struct GroupedTokens {
  const void* x;
  TokenType type;
  const float* x_scale;  // e4m3 tokens
  int64_t x_scale_strides[3];
};

struct GroupedArgs {
  Layout layout;
  Format format;
  DType dtype;  // of out
  GroupedTokens tokens;
  Projection weights;
  const int* groups;       // or null
  const int* row_tokens;   // kIndexed
  void* out;
  uint8_t* workspace;
  int64_t experts, rows, tokens_total;  // rows: of out, in all
  int64_t rows_each;                    // kMasked
  int64_t k, n, k_blocks, row_blocks, tile;
};
int64_t grouped_workspace_bytes(int64_t rows, int64_t experts, int64_t k, bool fp8, bool indexed);
void run_grouped(const GroupedArgs&, cudaStream_t);

struct BatchedArgs {
  Experts experts;
  GroupedTokens tokens;  // [experts, rows_each, hidden]
  const int* counts;
  void* out;
  uint8_t* workspace;
  int64_t rows_each;
};
int64_t batched_workspace_bytes(int64_t rows_each, int64_t experts, int64_t hidden, int64_t intermediate, bool fp8);
void run_batched(const BatchedArgs&, cudaStream_t);

}  // namespace vllm_humming
