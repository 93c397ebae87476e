// SPDX-License-Identifier: Apache-2.0
// Geometry of packed weights (docs/kernel-notes.md, "Packed weights"): every format is a sequence of such chunks.
#pragma once

namespace vllm_humming {

constexpr int kBlockRows = 64;  // weight rows of one chunk: the M of wgmma
constexpr int kBlockK = 128;    // K of one chunk, and of one pipeline stage
constexpr int kCodeBytes = kBlockRows * kBlockK / 2;

// kMxfp4Fp8: MXFP4 weights laid out for FP8 tokens.
enum class Format : int { kMxfp4 = 0, kNvfp4 = 1, kMxfp4Fp8 = 2 };
constexpr int kFormats = 3;

constexpr int group_k(Format f) { return f == Format::kNvfp4 ? 16 : 32; }  // K that share a scale
constexpr int chunk_bytes(Format f) { return kCodeBytes + kBlockRows * (kBlockK / group_k(f)); }
// Tokens as e4m3 with one fp32 scale a token and kBlockK, instead of 16 bits wide.
constexpr bool fp8_tokens(Format f) { return f == Format::kMxfp4Fp8; }
constexpr int token_bytes(Format f) { return fp8_tokens(f) ? 1 : 2; }  // an element

}  // namespace vllm_humming
