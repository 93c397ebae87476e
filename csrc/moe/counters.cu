// SPDX-License-Identifier: Apache-2.0
// Counters of layers of few entries. They must be zero at a layer's start, and no kernel before it could zero them in a workspace that may hold
// anything; so they are the library's own, zero from its loading on, and each layer's last kernel zeroes what the layer used.
#include <atomic>
#include "launch.h"

namespace vllm_humming {
namespace {

using Counters = FusedCounters<kMostFewEntries>;

// Layers that may overlap must not share counters. Layers of a captured graph keep theirs for good, others take turns; both go round, which is
// safe as long as the layers so far apart do not run at the same time.
constexpr int kCaptured = 8192, kEager = 512;
__device__ Counters counters[kCaptured + kEager];
std::atomic<unsigned> captured{0}, eager{0};

}  // namespace

Counters* few_counters(cudaStream_t stream) {
  cudaStreamCaptureStatus status;
  check(cudaStreamIsCapturing(stream, &status), "ask whether a graph is captured");
  void* first = nullptr;
  check(cudaGetSymbolAddress(&first, counters), "find the counters");
  const unsigned at = status == cudaStreamCaptureStatusNone ? kCaptured + eager++ % kEager : captured++ % kCaptured;
  return static_cast<Counters*>(first) + at;
}

}  // namespace vllm_humming
