// SPDX-License-Identifier: Apache-2.0
// The scale of a group of e4m3 values. Host code too: tests/test_fp8.py compiles it.
#pragma once
#include <cmath>
#include "../inline.h"

namespace vllm_humming {

// The scale of a group whose largest magnitude is amax, and the factor that takes its values to e4m3: amax / 448 and 448 / amax, correctly
// rounded. A group of zeros has a finite scale; NaN and infinity spread to every product with the group.
// Not divisions: theirs is a call, behind which the compiler keeps nothing in uniform registers.
struct Fp8Scale {
  static constexpr float kMax = 448.0f, kLeast = 0x1p-100f;
  float scale, factor;

  // What `reciprocal` has to be given: a normal number, whose reciprocal is one too.
  static VLLM_HUMMING_INLINE float divisor(float amax) { return at_least(amax) * 0x1p-9f; }
  // reciprocal: of divisor(amax), to within one unit in the last place.
  VLLM_HUMMING_INLINE Fp8Scale(float amax, float reciprocal) {
    const float d = divisor(amax);
    amax = at_least(amax);
    const bool infinite = amax > 0x1.fffffep127f;
    const float quotient = amax * (1.0f / kMax);
    scale = infinite ? amax : fmaf(fmaf(-quotient, kMax, amax), 1.0f / kMax, quotient);
    const float r = fmaf(fmaf(-d, reciprocal, 1.0f), reciprocal, reciprocal);
    const float f = (kMax * 0x1p-9f) * r;
    factor = infinite ? 0.0f : fmaf(fmaf(-f, d, kMax * 0x1p-9f), r, f);
  }

 private:
  static VLLM_HUMMING_INLINE float at_least(float amax) { return amax < kLeast ? kLeast : amax; }  // keeps a NaN
};

}  // namespace vllm_humming
