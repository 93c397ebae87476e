// SPDX-License-Identifier: Apache-2.0
// One routed-experts layer on device pointers: what ops.cpp validates and layer.cpp runs.
#pragma once
#include "experts.h"

namespace vllm_humming {

struct LayerArgs {
  Experts experts;
  int64_t tokens, top_k, global_experts;
  const void* x;
  const float* topk_weights;
  const int* topk_ids;
  const int* expert_map;  // or null
  void* out;
  uint8_t* workspace;
  bool router_weight_on_input;
};

// Bytes of scratch for up to `tokens` tokens: monotone in tokens, bounded (larger batches run in chunks of kChunkTokens).
constexpr int64_t kChunkTokens = 16384;
int64_t layer_workspace_bytes(int64_t tokens, int64_t top_k, int64_t experts, int64_t hidden, int64_t intermediate, bool fp8);
void run_layer(const LayerArgs& args, cudaStream_t stream);

}  // namespace vllm_humming
