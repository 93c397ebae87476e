// SPDX-License-Identifier: Apache-2.0
// One routed-experts layer on device pointers: what ops.cpp validates and layer.cu runs.
#pragma once
#include "launch.h"

namespace vllm_humming {

struct LayerShape {
  int64_t tokens, top_k, experts, global_experts, hidden, intermediate;  // intermediate: padded, a multiple of 128
  bool gated, fp8;  // fp8: tokens and activations as e4m3
};

struct Projection {
  const uint8_t* packed;
  const float* row_scale;
  const float* bias;  // or null
};

struct LayerArgs {
  LayerShape shape;
  DType dtype;
  Format format;
  const void* x;
  const float* topk_weights;
  const int* topk_ids;
  const int* expert_map;  // or null
  Projection up, down;
  void* out;
  uint8_t* workspace;
  Activation activation;
  float alpha, beta, limit;
  bool router_weight_on_input;
  int64_t tile_up, tile_down;
};

// Bytes of scratch for up to `tokens` tokens: monotone in tokens, bounded (larger batches run in chunks of kChunkTokens).
constexpr int64_t kChunkTokens = 16384;
int64_t workspace_bytes(const LayerShape& shape);
void run_layer(const LayerArgs& args, cudaStream_t stream);

// out[tokens, rows] = x[tokens, k] * W^T for one expert, without activation: the GEMM alone, for tests and benchmarks.
int64_t plain_scratch_bytes(Format format, int64_t tokens, int64_t k);
void run_plain(Format format, DType dtype, const void* x, const Projection& w, void* out, int64_t tokens, int64_t k, int64_t k_blocks, int64_t out_features,
               int64_t row_blocks, int64_t tile, uint8_t* scratch, cudaStream_t stream);

}  // namespace vllm_humming
