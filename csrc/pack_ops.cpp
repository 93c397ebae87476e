// SPDX-License-Identifier: Apache-2.0
// CUDA implementation of pack_rows.
#include "moe/pack.h"
#include "tensors.h"

namespace vllm_humming {
namespace {

void pack_rows(Tensor codes, Tensor scales, OptionalTensor global_scale, OptionalTensor bias, Tensor row_scale, Tensor packed,
               Tensor packed_row_scale, OptionalTensor packed_bias, Tensor record, int64_t weight_format, int64_t dtype, bool gated,
               bool interleaved, int64_t zero_group) {
  require(codes.is_cuda() && codes.dim() == 2 && packed.dim() == 3, "codes must be [N, K/2] and packed [rows/64, K/128, chunk], on a GPU");
  require(dtype == 0 || dtype == 1, "dtype must be 0 (bfloat16) or 1 (float16), found " + std::to_string(dtype));
  require(bias.has_value() == packed_bias.has_value(), "bias and packed_bias belong together");
  const int device = codes.get_device_index();
  const Format format = format_of(weight_format);
  const int64_t n = codes.size(0), k = codes.size(1) * 2, row_blocks = packed.size(0), k_blocks = packed.size(1), rows = row_blocks * kBlockRows;
  require(n <= rows && k <= k_blocks * kBlockK && k % group_k(format) == 0 && (!gated || n % 2 == 0) && row_blocks < 65536,
          "codes " + shape_of(codes) + " do not fit packed weights " + shape_of(packed));
  require_tensor(codes, "codes", device, ScalarType::Byte, {n, k / 2});
  require_tensor(scales, "scales", device, ScalarType::Byte, {n, k / group_k(format)});
  require(global_scale.has_value() == (format == Format::kNvfp4), "a global scale belongs to NVFP4, and to it alone");
  const int64_t globals = global_scale ? global_scale->numel() : 1;
  require(globals == 1 || globals == n, "global_scale must hold one value or " + std::to_string(n) + ", found " + std::to_string(globals));
  if (global_scale) require_tensor(*global_scale, "global_scale", device, ScalarType::Float, {globals});
  require_tensor(row_scale, "row_scale", device, ScalarType::Float, {n});
  require_tensor(record, "record", device, ScalarType::Long, {kFields});
  if (bias) require_tensor(*bias, "bias", device, ScalarType::Float, {n});
  require_tensor(packed, "packed", device, ScalarType::Byte, {row_blocks, k_blocks, chunk_bytes(format)});
  require_tensor(packed_row_scale, "packed_row_scale", device, ScalarType::Float, {rows});
  if (packed_bias) require_tensor(*packed_bias, "packed_bias", device, ScalarType::Float, {rows});
  require(reinterpret_cast<uintptr_t>(codes.const_data_ptr()) % 8 == 0, "codes must start at a multiple of 8 bytes");
  require_aligned(packed, "packed");
  PackParams p = {};
  p.codes = static_cast<const uint8_t*>(codes.const_data_ptr());
  p.scales = static_cast<const uint8_t*>(scales.const_data_ptr());
  p.global_scale = global_scale ? static_cast<const float*>(global_scale->const_data_ptr()) : nullptr;
  p.global_stride = globals == 1 ? 0 : 1;
  p.row_scale = static_cast<float*>(row_scale.mutable_data_ptr());
  p.bias = bias ? static_cast<const float*>(bias->const_data_ptr()) : nullptr;
  p.packed = static_cast<uint8_t*>(packed.mutable_data_ptr());
  p.packed_row_scale = static_cast<float*>(packed_row_scale.mutable_data_ptr());
  p.packed_bias = packed_bias ? static_cast<float*>(packed_bias->mutable_data_ptr()) : nullptr;
  p.record = static_cast<int64_t*>(record.mutable_data_ptr());
  p.rows_in = int(n);
  p.k_in = int(k);
  p.k_blocks = int(k_blocks);
  p.gated = gated;
  p.interleaved = interleaved;
  p.zero_group = uint8_t(zero_group);
  if (row_blocks == 0 || k_blocks == 0 || n == 0) return;
  DeviceGuard guard(device);
  launch_pack(format, static_cast<DType>(dtype), row_blocks, p, current_stream(device));
}

}  // namespace
}  // namespace vllm_humming

STABLE_TORCH_LIBRARY_IMPL(vllm_humming, CUDA, m) { m.impl("pack_rows", TORCH_BOX(&vllm_humming::pack_rows)); }
