// SPDX-License-Identifier: Apache-2.0
// One expert's checkpoint rows into packed weights (docs/kernel-notes.md, "Packed weights"), padding included.
#pragma once
#include <cstdint>
#include "launch.h"

namespace vllm_humming {

// What is found in the weights, added to a record of int64. The first four hold the first place of what is refused, as row << 32 | detail, and
// kNothingFound where there is none; nothing is packed unless they all do. vllm_humming/moe/findings.py has the same.
enum Field : int {
  kBadScale = 0,       // group << 8 | byte
  kBadBias = 1,        // 0
  kBadGlobal = 2,      // bits of the value
  kOutsideWindow = 3,  // smallest << 8 | largest scale byte
  kRoundedGroups = 4,  // how many
  kWorstChange = 5,    // bits of the float64: a weight's change relative to the largest magnitude of its row
  kFields = 6,
};
constexpr int64_t kNothingFound = INT64_MAX;

struct PackParams {
  const uint8_t* codes;       // [rows_in, k_in / 2], even k in the low nibble
  const uint8_t* scales;      // [rows_in, k_in / group], as the checkpoint has them
  const float* global_scale;  // [rows_in], or one for all of them, or null
  const float* bias;          // [rows_in], or null
  float* row_scale;           // [rows_in]: from the first kernel to the second
  uint8_t* packed;            // [row_blocks, k_blocks, chunk_bytes]
  float* packed_row_scale;    // [row_blocks * 64]
  float* packed_bias;         // the same, or null
  int64_t* record;            // [kFields]
  int rows_in, k_in, k_blocks;
  int global_stride;       // 0 or 1
  bool gated, interleaved; // gated rows in the checkpoint: [gate; up], or gate0, up0, gate1, ..
  uint8_t zero_group;      // scale byte of groups that the checkpoint does not have, and of those without a non-zero code
};

void launch_pack(Format format, DType dtype, int64_t row_blocks, const PackParams&, cudaStream_t);

}  // namespace vllm_humming
