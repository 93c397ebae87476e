// SPDX-License-Identifier: Apache-2.0
// CUDA implementations of grouped_gemm and moe_batched. What groups, counts and rows hold is not checked: it is on the device.
#include "moe/grouped.h"
#include <limits>
#include "tensors.h"

namespace vllm_humming {
namespace {

constexpr int64_t kMostRows = std::numeric_limits<int>::max();

// x [.., tokens, K], checked, with the scales of e4m3 tokens; dtype: of out.
GroupedTokens tokens_of(const Tensor& x, const OptionalTensor& x_scale, DType dtype, Format format, int device) {
  GroupedTokens t = {};
  const bool given = fp8_tokens(format) && x.scalar_type() == ScalarType::Float8_e4m3fn;
  t.type = given ? TokenType::kFp8 : token_type(dtype_of(x, fp8_tokens(format) ? "x, if not float8_e4m3fn," : "x"));
  require(fp8_tokens(format) || t.type == token_type(dtype), "x and out must be of one dtype");
  require(given == x_scale.has_value(), "x_scale belongs to float8_e4m3fn tokens, which need it");
  require(x.is_cuda() && x.get_device_index() == device && x.is_contiguous(), "x must be contiguous and on one device with the others");
  require_aligned(x, "x");
  t.x = x.const_data_ptr();
  if (!given) return t;
  const int64_t dim = x.dim();
  bool fits = x_scale->is_cuda() && x_scale->get_device_index() == device && x_scale->scalar_type() == ScalarType::Float && x_scale->dim() == dim &&
              x_scale->size(dim - 1) == blocks(x.size(dim - 1), kBlockK);
  for (int64_t i = 0; fits && i + 1 < dim; ++i) fits = x_scale->size(i) == x.size(i);
  require(fits, "x_scale must be float32 on x's device, [.., tokens, K / 128] for x " + shape_of(x) + ", found " + shape_of(*x_scale));
  t.x_scale = static_cast<const float*>(x_scale->const_data_ptr());
  t.x_scale_strides[0] = dim == 3 ? x_scale->stride(0) : 0;
  t.x_scale_strides[1] = x_scale->stride(dim - 2);
  t.x_scale_strides[2] = x_scale->stride(dim - 1);
  return t;
}

const int* ints(const Tensor& t, const char* name, int64_t size, int device) {
  require_tensor(t, name, device, ScalarType::Int, {size});
  return static_cast<const int*>(t.const_data_ptr());
}

void grouped_gemm(Tensor x, OptionalTensor x_scale, Tensor packed, Tensor row_scale, OptionalTensor bias, OptionalTensor groups, OptionalTensor rows,
                  Tensor workspace, Tensor out, int64_t layout, int64_t weight_format, int64_t tile) {
  require(x.is_cuda(), "x must be a CUDA tensor");
  require(layout >= 0 && layout <= 2, "layout must be 0 (contiguous), 1 (masked) or 2 (indexed), found " + std::to_string(layout));
  const int device = x.get_device_index();
  GroupedArgs a = {};
  a.layout = static_cast<Layout>(layout);
  a.format = format_of(weight_format);
  a.dtype = dtype_of(out, "out");
  a.weights = projection(packed, row_scale, bias, a.format, "packed", device);
  a.experts = packed.size(0);
  a.row_blocks = packed.size(1);
  a.k_blocks = packed.size(2);
  a.tile = tile;
  const bool masked = a.layout == Layout::kMasked;
  const int64_t dim = masked ? 3 : 2;
  require(x.dim() == dim && out.dim() == dim,
          "x and out must have " + std::to_string(dim) + " dimensions in this layout, found " + shape_of(x) + " and " + shape_of(out));
  a.k = x.size(dim - 1);
  a.n = out.size(dim - 1);
  a.tokens_total = x.size(0) * (masked ? x.size(1) : 1);
  a.rows = out.size(0) * (masked ? out.size(1) : 1);
  a.rows_each = masked ? out.size(1) : 0;
  require(a.layout == Layout::kIndexed || a.tokens_total == a.rows, "x " + shape_of(x) + " and out " + shape_of(out) + " must have the same rows");
  require(!masked || (x.size(0) == a.experts && out.size(0) == a.experts), "x and out must be [E, max, ..] with the experts of packed");
  require(a.rows <= kMostRows && a.tokens_total <= kMostRows, "too many rows");
  require(a.k > 0 && a.n > 0 && a.k % 8 == 0 && a.n % 8 == 0 && a.k <= a.k_blocks * kBlockK && a.n <= a.row_blocks * kBlockRows,
          "K = " + std::to_string(a.k) + " of x and N = " + std::to_string(a.n) + " of out must be multiples of 8 and fit packed " +
              shape_of(packed));
  // FP8 tokens need scales for each 128 of the packed K, and rows that are copied whole are filled up only within the last.
  require(blocks(a.k, kBlockK) == a.k_blocks,
          "K = " + std::to_string(a.k) + " of x must be the packed K but for less than 128: it does not fit packed " + shape_of(packed));
  a.tokens = tokens_of(x, x_scale, a.dtype, a.format, device);
  require(out.is_cuda() && out.get_device_index() == device && out.is_contiguous(), "out must be contiguous and on x's device");
  require_aligned(out, "out");
  a.out = out.mutable_data_ptr();
  require(rows.has_value() == (a.layout == Layout::kIndexed), "rows belong to the indexed layout, which needs them");
  if (rows) a.row_tokens = ints(*rows, "rows", a.rows, device);
  require(groups || (a.layout == Layout::kContiguous && a.experts == 1), "groups may be None with one expert in the contiguous layout only");
  if (groups) a.groups = ints(*groups, "groups", a.experts + !masked, device);
  const int64_t needed = grouped_workspace_bytes(a.rows, a.experts, a.k, fp8_tokens(a.format), a.layout == Layout::kIndexed);
  a.workspace = workspace_of(workspace, needed, device);
  if (a.rows == 0 || a.tokens_total == 0) return;
  DeviceGuard guard(device);
  run_grouped(a, current_stream(device));
}

int64_t grouped_gemm_workspace_bytes(int64_t rows, int64_t num_experts, int64_t k, int64_t weight_format, int64_t layout) {
  require(rows >= 0 && num_experts > 0 && k > 0, "workspace sizes must be positive");
  require(layout >= 0 && layout <= 2, "layout must be 0 (contiguous), 1 (masked) or 2 (indexed), found " + std::to_string(layout));
  return grouped_workspace_bytes(rows, num_experts, k, fp8_tokens(format_of(weight_format)), Layout(layout) == Layout::kIndexed);
}

void moe_batched(Tensor x, OptionalTensor x_scale, Tensor counts, Tensor w13, Tensor w13_row_scale, OptionalTensor w13_bias, Tensor w2,
                 Tensor w2_row_scale, OptionalTensor w2_bias, Tensor workspace, Tensor out, int64_t weight_format, int64_t activation, double alpha,
                 double beta, double limit, int64_t tile1, int64_t tile2) {
  require(x.is_cuda() && x.dim() == 3, "x must be a CUDA tensor [E, max, H]");
  const int device = x.get_device_index();
  const int64_t hidden = x.size(2);
  BatchedArgs a = {};
  a.experts = layer_experts(hidden, w13, w13_row_scale, w13_bias, w2, w2_row_scale, w2_bias, weight_format, activation, alpha, beta, limit,
                            tile1, tile2, device);
  Experts& e = a.experts;
  e.dtype = dtype_of(out, "out");
  a.rows_each = x.size(1);
  require(x.size(0) == e.experts, "x must be [E, max, H] with the experts of w13, found " + shape_of(x));
  require_tensor(out, "out", device, out.scalar_type(), {e.experts, a.rows_each, hidden});
  require_aligned(out, "out");
  require(a.rows_each * e.experts <= kMostRows && a.rows_each * e.experts * hidden < kMostGathered, "too many rows");
  a.tokens = tokens_of(x, x_scale, e.dtype, e.format, device);
  a.counts = ints(counts, "counts", e.experts, device);
  a.out = out.mutable_data_ptr();
  a.workspace = workspace_of(workspace, batched_workspace_bytes(a.rows_each, e.experts, hidden, e.intermediate, e.fp8()), device);
  if (a.rows_each == 0) return;
  DeviceGuard guard(device);
  run_batched(a, current_stream(device));
}

int64_t moe_batched_workspace_bytes(int64_t max_tokens, int64_t num_experts, int64_t hidden, int64_t intermediate_padded, int64_t weight_format) {
  require(max_tokens >= 0 && num_experts > 0 && hidden > 0 && intermediate_padded > 0, "workspace sizes must be positive");
  return batched_workspace_bytes(max_tokens, num_experts, hidden, intermediate_padded, fp8_tokens(format_of(weight_format)));
}

}  // namespace
}  // namespace vllm_humming

STABLE_TORCH_LIBRARY_IMPL(vllm_humming, CUDA, m) {
  m.impl("grouped_gemm", TORCH_BOX(&vllm_humming::grouped_gemm));
  m.impl("moe_batched", TORCH_BOX(&vllm_humming::moe_batched));
}

STABLE_TORCH_LIBRARY_IMPL(vllm_humming, CompositeExplicitAutograd, m) {
  m.impl("grouped_gemm_workspace_bytes", TORCH_BOX(&vllm_humming::grouped_gemm_workspace_bytes));
  m.impl("moe_batched_workspace_bytes", TORCH_BOX(&vllm_humming::moe_batched_workspace_bytes));
}
