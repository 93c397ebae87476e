// SPDX-License-Identifier: Apache-2.0
// CUDA implementations of the ops whose schemas vllm_humming/ops.py defines, on torch's stable ABI: one binary serves torch 2.11 and later. Here the
// routed-experts layer and what the tiles are; those of tokens in groups are in grouped_ops.cpp.
#include <vector>
#include "moe/layer.h"
#include "tensors.h"

namespace vllm_humming {
namespace {

void moe(Tensor x, Tensor topk_weights, Tensor topk_ids, OptionalTensor expert_map, Tensor w13, Tensor w13_row_scale, OptionalTensor w13_bias,
         Tensor w2, Tensor w2_row_scale, OptionalTensor w2_bias, Tensor workspace, Tensor out, int64_t weight_format, int64_t activation,
         double alpha, double beta, double limit, bool router_weight_on_input, int64_t tile1, int64_t tile2) {
  require(x.is_cuda(), "x must be a CUDA tensor");
  require(x.dim() == 2 && topk_ids.dim() == 2, "x must be [M, H] and topk_ids [M, top_k]");
  const int device = x.get_device_index();
  LayerArgs a = {};
  a.tokens = x.size(0);
  a.top_k = topk_ids.size(1);
  const int64_t hidden = x.size(1);
  if (a.tokens == 0 || hidden == 0) return;
  require(a.top_k > 0, "top_k must be at least 1");
  a.experts = layer_experts(hidden, w13, w13_row_scale, w13_bias, w2, w2_row_scale, w2_bias, weight_format, activation, alpha, beta, limit,
                            tile1, tile2, device);
  a.experts.dtype = dtype_of(x, "x");
  require_tensor(x, "x", device, x.scalar_type(), {a.tokens, hidden});
  require_tensor(out, "out", device, x.scalar_type(), {a.tokens, hidden});
  require_tensor(topk_weights, "topk_weights", device, ScalarType::Float, {a.tokens, a.top_k});
  require_tensor(topk_ids, "topk_ids", device, ScalarType::Int, {a.tokens, a.top_k});
  a.global_experts = a.experts.experts;
  if (expert_map) {
    a.global_experts = expert_map->numel();
    require_tensor(*expert_map, "expert_map", device, ScalarType::Int, {a.global_experts});
    a.expert_map = static_cast<const int*>(expert_map->const_data_ptr());
  }
  const Experts& e = a.experts;
  a.workspace = workspace_of(workspace, layer_workspace_bytes(a.tokens, a.top_k, e.experts, hidden, e.intermediate, e.fp8()), device);
  require_aligned(x, "x");
  require_aligned(out, "out");
  a.x = x.const_data_ptr();
  a.out = out.mutable_data_ptr();
  a.topk_weights = static_cast<const float*>(topk_weights.const_data_ptr());
  a.topk_ids = static_cast<const int*>(topk_ids.const_data_ptr());
  a.router_weight_on_input = router_weight_on_input;
  DeviceGuard guard(device);
  run_layer(a, current_stream(device));
}

int64_t moe_workspace_bytes(int64_t tokens, int64_t top_k, int64_t num_experts, int64_t hidden, int64_t intermediate_padded, int64_t weight_format) {
  require(tokens >= 0 && top_k > 0 && num_experts > 0 && hidden > 0 && intermediate_padded > 0, "workspace sizes must be positive");
  return layer_workspace_bytes(tokens, top_k, num_experts, hidden, intermediate_padded, fp8_tokens(format_of(weight_format)));
}

// Field `field` of compiled tile `tile`: 0 blocks of 64 rows, 1 CTAs an SM, 2 stages, 3 threads, 4 shared bytes, 5 number of token
// widths, 6.. the widths, then the cycles of each; stages and bytes as compiled for MXFP4. Tile -1: how many tiles there are.
int64_t tile_field(int64_t tile, int64_t field) {
  if (tile < 0) return tile_total();
  const Tile& t = tile_at(tile);
  std::vector<int64_t> fields = {t.blocks, t.ctas, t.stages, t.threads, t.shared_bytes, t.widths.count};
  fields.insert(fields.end(), t.widths.at, t.widths.at + t.widths.count);
  fields.insert(fields.end(), t.cycles, t.cycles + t.widths.count);
  require(field >= 0 && field < int64_t(fields.size()), "tile_field has no field " + std::to_string(field));
  return fields[field];
}

}  // namespace
}  // namespace vllm_humming

STABLE_TORCH_LIBRARY_IMPL(vllm_humming, CUDA, m) { m.impl("moe", TORCH_BOX(&vllm_humming::moe)); }

STABLE_TORCH_LIBRARY_IMPL(vllm_humming, CompositeExplicitAutograd, m) {
  m.impl("moe_workspace_bytes", TORCH_BOX(&vllm_humming::moe_workspace_bytes));
  m.impl("tile_field", TORCH_BOX(&vllm_humming::tile_field));
}
