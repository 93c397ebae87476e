// SPDX-License-Identifier: Apache-2.0
// Geometry of packed weights (docs/kernel-notes.md, "Packed weights"): every format is a sequence of such chunks.
#pragma once

namespace vllm_humming {

constexpr int kBlockRows = 64;  // weight rows of one chunk: the M of wgmma
constexpr int kBlockK = 128;    // K of one chunk, and of one pipeline stage
constexpr int kCodeBytes = kBlockRows * kBlockK / 2;

enum class Format : int { kMxfp4 = 0, kNvfp4 = 1 };
constexpr int kFormats = 2;

constexpr int group_k(Format f) { return f == Format::kMxfp4 ? 32 : 16; }  // K that share a scale
constexpr int chunk_bytes(Format f) { return kCodeBytes + kBlockRows * (kBlockK / group_k(f)); }

}  // namespace vllm_humming
