// SPDX-License-Identifier: Apache-2.0
// What the operators' CUDA implementations share: checks of tensors, the device and its stream.
#pragma once
#include <dlfcn.h>
#include <optional>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include "mma/chunk.h"
#include "moe/experts.h"

namespace vllm_humming {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline void require(bool ok, const std::string& message) {
  if (!ok) throw std::runtime_error("vllm_humming: " + message);
}

// libtorch_cuda is looked up at run time, so that the library also loads (and its CPU tests run) beside a CPU-only torch.
inline cudaStream_t current_stream(int device) {
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

inline DType dtype_of(const Tensor& t, const char* name) {
  const auto type = t.scalar_type();
  require(type == ScalarType::BFloat16 || type == ScalarType::Half, std::string(name) + " must be bfloat16 or float16");
  return type == ScalarType::BFloat16 ? DType::kBf16 : DType::kFp16;
}

inline std::string shape_of(const Tensor& t) {
  std::string s = "[";
  for (int64_t i = 0; i < t.dim(); ++i) s += (i ? ", " : "") + std::to_string(t.size(i));
  return s + "]";
}

inline void require_tensor(const Tensor& t, const char* name, int device, ScalarType type, std::initializer_list<int64_t> shape) {
  bool ok = t.is_cuda() && t.get_device_index() == device && t.scalar_type() == type && t.is_contiguous() && t.dim() == int64_t(shape.size());
  std::string expected = "[";
  int64_t i = 0;
  for (int64_t n : shape) {
    ok = ok && t.size(i) == n;
    expected += (i++ ? ", " : "") + std::to_string(n);
  }
  require(ok, std::string(name) + " must be a contiguous " + expected + "] tensor of the op's dtype on x's device, found " + shape_of(t));
}

inline void require_aligned(const Tensor& t, const char* name) {
  require(reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0, std::string(name) + " must start at a multiple of 16 bytes");
}

inline Format format_of(int64_t weight_format) {
  require(weight_format >= 0 && weight_format < kFormats,
          "weight_format must be 0 (MXFP4), 1 (NVFP4) or 2 (MXFP4 for FP8 activations), found " + std::to_string(weight_format));
  return static_cast<Format>(weight_format);
}

// Shape of packed weights, checked: [experts, row_blocks, k_blocks, chunk_bytes] uint8.
inline Projection projection(const Tensor& packed, const Tensor& row_scale, const OptionalTensor& bias, Format format, const char* name, int device) {
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

// The packed weights of a layer, which must fit each other and the hidden size. Fills experts, hidden, intermediate, format, activation and both
// projections.
inline Experts layer_experts(int64_t hidden, const Tensor& w13, const Tensor& w13_row_scale, const OptionalTensor& w13_bias, const Tensor& w2,
                             const Tensor& w2_row_scale, const OptionalTensor& w2_bias, int64_t weight_format, int64_t activation, double alpha,
                             double beta, double limit, int64_t tile_up, int64_t tile_down, int device) {
  require(activation >= 0 && activation <= 2, "activation must be 0..2, found " + std::to_string(activation));
  Experts e = {};
  e.format = format_of(weight_format);
  e.activation = static_cast<Activation>(activation);
  e.up = projection(w13, w13_row_scale, w13_bias, e.format, "w13", device);
  e.down = projection(w2, w2_row_scale, w2_bias, e.format, "w2", device);
  e.experts = w13.size(0);
  e.hidden = hidden;
  e.intermediate = w2.size(2) * kBlockK;
  require(e.experts == w2.size(0), "w13 and w2 must have the same number of experts");
  require(hidden % 8 == 0, "the hidden size must be a multiple of 8, found " + std::to_string(hidden));
  require(w13.size(2) == blocks(hidden, kBlockK) && w2.size(1) == blocks(hidden, kBlockRows),
          "w13 " + shape_of(w13) + " and w2 " + shape_of(w2) + " do not fit the hidden size " + std::to_string(hidden));
  require(w13.size(1) * kBlockRows == e.intermediate * (is_gated(e.activation) ? 2 : 1), "w13 and w2 must have the same padded intermediate size");
  e.alpha = float(alpha);
  e.beta = float(beta);
  e.limit = float(limit);
  e.tile_up = tile_up;
  e.tile_down = tile_down;
  return e;
}

inline uint8_t* workspace_of(const Tensor& workspace, int64_t needed, int device) {
  require(workspace.is_cuda() && workspace.get_device_index() == device && workspace.scalar_type() == ScalarType::Byte && workspace.is_contiguous() &&
              workspace.numel() >= needed,
          "workspace must hold " + std::to_string(needed) + " bytes on x's device, found " + std::to_string(workspace.numel()));
  require_aligned(workspace, "workspace");
  return static_cast<uint8_t*>(workspace.mutable_data_ptr());
}

}  // namespace vllm_humming
