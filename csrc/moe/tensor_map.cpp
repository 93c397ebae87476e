// SPDX-License-Identifier: Apache-2.0
#include "launch.h"

namespace vllm_humming {

namespace {

CUtensorMap encode(CUtensorMapDataType type, int element, const void* data, int64_t rows, int64_t columns, int64_t stride, int box_rows, int box_columns,
                   CUtensorMapSwizzle swizzle) {
  // From the driver at run time, so that the library needs no libcuda to link or load.
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result = {};
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result), "find cuTensorMapEncodeTiled");
    return reinterpret_cast<Encode>(found);
  }();
  if (function == nullptr) throw std::runtime_error("vllm_humming: this driver has no cuTensorMapEncodeTiled");
  CUtensorMap map = {};
  const cuuint64_t sizes[] = {cuuint64_t(columns), cuuint64_t(rows)}, strides[] = {cuuint64_t(stride) * element};
  const cuuint32_t box[] = {cuuint32_t(box_columns), cuuint32_t(box_rows)}, steps[] = {1, 1};
  const CUresult status = function(&map, type, 2, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS)
    throw std::runtime_error("vllm_humming: cuTensorMapEncodeTiled failed with " + std::to_string(int(status)) + " for [" + std::to_string(rows) + ", " +
                             std::to_string(columns) + "] tokens");
  return map;
}

}  // namespace

CUtensorMap token_map(TokenType type, const void* data, int64_t rows, int64_t columns, int64_t stride, int box_rows) {
  const auto encoded = type == TokenType::kBf16   ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                       : type == TokenType::kFp16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                  : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const int element = type == TokenType::kFp8 ? 1 : 2;
  return encode(encoded, element, data, rows, columns, stride, box_rows, 128 / element, CU_TENSOR_MAP_SWIZZLE_128B);
}

CUtensorMap scale_map(const float* data, int64_t groups, int64_t stride, int width) {
  return encode(CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, data, groups, stride, stride, 1, width, CU_TENSOR_MAP_SWIZZLE_NONE);
}

}  // namespace vllm_humming
