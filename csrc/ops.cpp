// SPDX-License-Identifier: Apache-2.0
// CUDA implementations of the ops whose schemas vllm_humming/ops.py defines, on torch's stable ABI: one binary serves torch 2.11 and later.
#include <dlfcn.h>
#include <limits>
#include <optional>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include "mma/chunk.h"
#include "moe/layer.h"

namespace vllm_humming {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void require(bool ok, const std::string& message) {
  if (!ok) throw std::runtime_error("vllm_humming: " + message);
}

// libtorch_cuda is looked up at run time, so that the library also loads (and its CPU tests run) beside a CPU-only torch.
cudaStream_t current_stream(int device) {
  using Function = int (*)(int32_t, void**);
  static const Function function = [] {
    void* handle = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    return handle ? reinterpret_cast<Function>(dlsym(handle, "aoti_torch_get_current_cuda_stream")) : nullptr;
  }();
  require(function != nullptr, "this torch has no CUDA: install a CUDA build of torch");
  void* stream = nullptr;
  require(function(device, &stream) == 0, "could not read torch's current CUDA stream");
  return static_cast<cudaStream_t>(stream);
}

struct DeviceGuard {
  int previous = -1;
  bool changed = false;
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&previous), "read the current device");
    changed = previous != device;
    if (changed) check(cudaSetDevice(device), "select the tensors' device");
  }
  ~DeviceGuard() {
    if (changed) cudaSetDevice(previous);
  }
};

DType dtype_of(const Tensor& t, const char* name) {
  const auto type = t.scalar_type();
  require(type == ScalarType::BFloat16 || type == ScalarType::Half, std::string(name) + " must be bfloat16 or float16");
  return type == ScalarType::BFloat16 ? DType::kBf16 : DType::kFp16;
}

std::string shape_of(const Tensor& t) {
  std::string s = "[";
  for (int64_t i = 0; i < t.dim(); ++i) s += (i ? ", " : "") + std::to_string(t.size(i));
  return s + "]";
}

void require_tensor(const Tensor& t, const char* name, int device, ScalarType type, std::initializer_list<int64_t> shape) {
  bool ok = t.is_cuda() && t.get_device_index() == device && t.scalar_type() == type && t.is_contiguous() && t.dim() == int64_t(shape.size());
  std::string expected = "[";
  int64_t i = 0;
  for (int64_t n : shape) {
    ok = ok && t.size(i) == n;
    expected += (i++ ? ", " : "") + std::to_string(n);
  }
  require(ok, std::string(name) + " must be a contiguous " + expected + "] tensor of the op's dtype on x's device, found " + shape_of(t));
}

void require_aligned(const Tensor& t, const char* name) {
  require(reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0, std::string(name) + " must start at a multiple of 16 bytes");
}

Format format_of(int64_t weight_format) {
  require(weight_format >= 0 && weight_format < kFormats, "weight_format must be 0 (MXFP4), 1 (NVFP4) or 2 (MXFP4 for FP8 activations), found " + std::to_string(weight_format));
  return static_cast<Format>(weight_format);
}

// Shape of packed weights, checked: [experts, row_blocks, k_blocks, chunk_bytes] uint8.
Projection projection(const Tensor& packed, const Tensor& row_scale, const std::optional<Tensor>& bias, Format format, const char* name, int device) {
  const int chunk = chunk_bytes(format);
  require(packed.dim() == 4 && packed.size(3) == chunk,
          std::string(name) + " must be packed weights [E, rows/64, K/128, " + std::to_string(chunk) + "], found " + shape_of(packed));
  require_tensor(packed, name, device, ScalarType::Byte, {packed.size(0), packed.size(1), packed.size(2), chunk});
  const int64_t rows = packed.size(1) * kBlockRows;
  require_tensor(row_scale, "row_scale", device, ScalarType::Float, {packed.size(0), rows});
  if (bias) require_tensor(*bias, "bias", device, ScalarType::Float, {packed.size(0), rows});
  require(packed.size(0) > 0 && packed.size(1) > 0 && packed.size(2) > 0, std::string(name) + " is empty: " + shape_of(packed));
  require_aligned(packed, name);
  require_aligned(row_scale, "row_scale");
  if (bias) require_aligned(*bias, "bias");
  return {static_cast<const uint8_t*>(packed.const_data_ptr()), static_cast<const float*>(row_scale.const_data_ptr()),
          bias ? static_cast<const float*>(bias->const_data_ptr()) : nullptr};
}

void moe(Tensor x, Tensor topk_weights, Tensor topk_ids, std::optional<Tensor> expert_map, Tensor w13, Tensor w13_row_scale,
         std::optional<Tensor> w13_bias, Tensor w2, Tensor w2_row_scale, std::optional<Tensor> w2_bias, Tensor workspace, Tensor out,
         int64_t weight_format, int64_t activation, double alpha, double beta, double limit, bool router_weight_on_input, int64_t tile1,
         int64_t tile2) {
  require(x.is_cuda(), "x must be a CUDA tensor");
  require(x.dim() == 2 && topk_ids.dim() == 2, "x must be [M, H] and topk_ids [M, top_k]");
  require(activation >= 0 && activation <= 2, "activation must be 0..2, found " + std::to_string(activation));
  const int device = x.get_device_index();
  LayerArgs a = {};
  a.dtype = dtype_of(x, "x");
  a.format = format_of(weight_format);
  a.activation = static_cast<Activation>(activation);
  LayerShape& s = a.shape;
  s.tokens = x.size(0);
  s.hidden = x.size(1);
  s.top_k = topk_ids.size(1);
  if (s.tokens == 0 || s.hidden == 0) return;
  require(s.top_k > 0, "top_k must be at least 1");
  a.up = projection(w13, w13_row_scale, w13_bias, a.format, "w13", device);
  a.down = projection(w2, w2_row_scale, w2_bias, a.format, "w2", device);
  s.experts = w13.size(0);
  s.gated = a.activation != Activation::kRelu2;
  s.fp8 = fp8_tokens(a.format);
  s.intermediate = w2.size(2) * kBlockK;
  require(s.experts == w2.size(0), "w13 and w2 must have the same number of experts");
  require(s.hidden % 8 == 0, "the hidden size must be a multiple of 8, found " + std::to_string(s.hidden));
  require(w13.size(2) == (s.hidden + kBlockK - 1) / kBlockK && w2.size(1) == (s.hidden + kBlockRows - 1) / kBlockRows,
          "w13 " + shape_of(w13) + " and w2 " + shape_of(w2) + " do not fit the hidden size " + std::to_string(s.hidden));
  require(w13.size(1) * kBlockRows == s.intermediate * (s.gated ? 2 : 1), "w13 and w2 must have the same padded intermediate size");
  require_tensor(x, "x", device, x.scalar_type(), {s.tokens, s.hidden});
  require_tensor(out, "out", device, x.scalar_type(), {s.tokens, s.hidden});
  require_tensor(topk_weights, "topk_weights", device, ScalarType::Float, {s.tokens, s.top_k});
  require_tensor(topk_ids, "topk_ids", device, ScalarType::Int, {s.tokens, s.top_k});
  s.global_experts = s.experts;
  if (expert_map) {
    s.global_experts = expert_map->numel();
    require_tensor(*expert_map, "expert_map", device, ScalarType::Int, {s.global_experts});
    a.expert_map = static_cast<const int*>(expert_map->const_data_ptr());
  }
  const int64_t needed = workspace_bytes(s);
  require(workspace.is_cuda() && workspace.get_device_index() == device && workspace.scalar_type() == ScalarType::Byte && workspace.is_contiguous() && workspace.numel() >= needed,
          "workspace must hold " + std::to_string(needed) + " bytes on x's device, found " + std::to_string(workspace.numel()));
  a.workspace = static_cast<uint8_t*>(workspace.mutable_data_ptr());
  require_aligned(x, "x");
  require_aligned(out, "out");
  require_aligned(workspace, "workspace");
  a.x = x.const_data_ptr();
  a.out = out.mutable_data_ptr();
  a.topk_weights = static_cast<const float*>(topk_weights.const_data_ptr());
  a.topk_ids = static_cast<const int*>(topk_ids.const_data_ptr());
  a.alpha = float(alpha);
  a.beta = float(beta);
  a.limit = float(limit);
  a.router_weight_on_input = router_weight_on_input;
  a.tile_up = tile1;
  a.tile_down = tile2;
  DeviceGuard guard(device);
  run_layer(a, current_stream(device));
}

int64_t moe_workspace_bytes(int64_t tokens, int64_t top_k, int64_t num_experts, int64_t hidden, int64_t intermediate_padded, int64_t weight_format) {
  require(tokens >= 0 && top_k > 0 && num_experts > 0 && hidden > 0 && intermediate_padded > 0, "workspace sizes must be positive");
  LayerShape s = {};
  s.tokens = tokens;
  s.top_k = top_k;
  s.experts = num_experts;
  s.hidden = hidden;
  s.intermediate = intermediate_padded;
  s.fp8 = fp8_tokens(format_of(weight_format));
  return workspace_bytes(s);
}

void gemm_plain(Tensor x, Tensor packed, Tensor row_scale, std::optional<Tensor> bias, Tensor out, int64_t weight_format, int64_t tile) {
  require(x.is_cuda() && x.dim() == 2, "x must be a CUDA tensor [M, K]");
  const Format format = format_of(weight_format);
  const int device = x.get_device_index();
  const Projection w = projection(packed, row_scale, bias, format, "packed", device);
  require(packed.size(0) == 1, "gemm_plain takes one expert");
  require(out.dim() == 2, "out must be [M, N]");
  const int64_t tokens = x.size(0), k = x.size(1), n = out.size(1);
  require(k > 0 && n > 0 && k % 8 == 0 && n % 8 == 0 && k <= packed.size(2) * kBlockK && n <= packed.size(1) * kBlockRows, "x or out does not fit the packed weights");
  require(!fp8_tokens(format) || (k + kBlockK - 1) / kBlockK == packed.size(2),
          "FP8 tokens need scales for each 128 of the packed K: K = " + std::to_string(k) + " does not fit packed weights " + shape_of(packed));
  require_tensor(x, "x", device, x.scalar_type(), {tokens, k});
  require_tensor(out, "out", device, x.scalar_type(), {tokens, n});
  require_aligned(x, "x");
  require_aligned(out, "out");
  if (tokens == 0) return;
  DeviceGuard guard(device);
  Tensor scratch = torch::stable::new_empty(x, {plain_scratch_bytes(format, tokens, k)}, ScalarType::Byte);
  run_plain(format, dtype_of(x, "x"), x.const_data_ptr(), w, out.mutable_data_ptr(), tokens, k, packed.size(2), n, packed.size(1), tile,
            static_cast<uint8_t*>(scratch.mutable_data_ptr()), current_stream(device));
}

// Field `field` of compiled tile `tile`: 0 blocks of 64 rows, 1 CTAs an SM, 2 stages, 3 threads, 4 shared bytes, 5 number of token
// widths, 6.. the widths; stages and bytes as compiled for MXFP4. Tile -1: how many tiles there are.
int64_t tile_field(int64_t tile, int64_t field) {
  if (tile < 0) return tile_total();
  const Tile& t = tile_at(tile);
  const int64_t fields[] = {t.blocks, t.ctas, t.stages, t.threads, t.shared_bytes, t.widths.count};
  require(field >= 0 && field < 6 + t.widths.count, "tile_field has no field " + std::to_string(field));
  return field < 6 ? fields[field] : t.widths.at[field - 6];
}

}  // namespace
}  // namespace vllm_humming

STABLE_TORCH_LIBRARY_IMPL(vllm_humming, CUDA, m) {
  m.impl("moe", TORCH_BOX(&vllm_humming::moe));
  m.impl("gemm_plain", TORCH_BOX(&vllm_humming::gemm_plain));
}

STABLE_TORCH_LIBRARY_IMPL(vllm_humming, CompositeExplicitAutograd, m) {
  m.impl("moe_workspace_bytes", TORCH_BOX(&vllm_humming::moe_workspace_bytes));
  m.impl("tile_field", TORCH_BOX(&vllm_humming::tile_field));
}
