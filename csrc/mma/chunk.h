// SPDX-License-Identifier: Apache-2.0
// Geometry of packed weights (docs/kernel-notes.md, "Packed weights"): every format is a sequence of such chunks.
#pragma once

namespace vllm_humming {

constexpr int kBlockRows = 64;  // weight rows of one chunk: the M of wgmma
constexpr int kBlockK = 128;    // K of one chunk, and of one pipeline stage
constexpr int kCodeBytes = kBlockRows * kBlockK / 2;
constexpr int kChunkBytes = kCodeBytes + kBlockRows * (kBlockK / 32);

}  // namespace vllm_humming
