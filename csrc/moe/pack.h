// SPDX-License-Identifier: Apache-2.0
// One expert's checkpoint rows into packed weights (docs/kernel-notes.md, "Packed weights"), padding included.
#pragma once
#include <cstdint>
#include "launch.h"

namespace vllm_humming {

struct PackParams {
  const uint8_t* codes;    // [rows_in, k_in / 2], even k in the low nibble
  const uint8_t* scales;   // [rows_in, k_in / group], as the container holds them
  const float* row_scale;  // [rows_in]
  const float* bias;       // [rows_in], or null
  uint8_t* packed;         // [row_blocks, k_blocks, chunk_bytes]
  float* packed_row_scale; // [row_blocks * 64]
  float* packed_bias;      // the same, or null
  int rows_in, k_in, k_blocks;
  bool gated, interleaved; // gated rows in the checkpoint: [gate; up], or gate0, up0, gate1, ..
  uint8_t zero_group;      // scale byte of groups that the checkpoint does not have
};

void launch_pack(Format format, DType dtype, int64_t row_blocks, const PackParams&, cudaStream_t);

}  // namespace vllm_humming
