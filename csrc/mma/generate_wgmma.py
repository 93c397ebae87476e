# SPDX-License-Identifier: Apache-2.0
"""Writes wgmma.cuh: one wrapper for each token width N, because inline PTX needs every accumulator register by name.
With `shared`: wgmma_shared.cuh, the one whose operands are both in shared memory.

usage: python csrc/mma/generate_wgmma.py > csrc/mma/wgmma.cuh
       python csrc/mma/generate_wgmma.py shared > csrc/mma/wgmma_shared.cuh
"""

import sys

WIDTHS = (16, 32, 40, 48, 64, 80, 96, 128, 160)  # what the tiles use (csrc/moe/tiles)
FP8_WIDTHS = (8, 16, 32, 48, 64, 80, 96)

HEAD = """// SPDX-License-Identifier: Apache-2.0
// Written by generate_wgmma.py. D[64 weight rows x N tokens] += A[64 x 16] (registers) * B[16 x N] (shared memory, K-major); of FP8
// operands K is 32, and D may start anew instead.
#pragma once
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include "../ptx/ptx.cuh"

namespace vllm_humming {

template <typename T, int N>
struct Wgmma;
"""


def wrapper(ctype: str, ptx: str, n: int, k: int) -> str:
    fp8 = k == 32
    template = "template <bool Accumulate, int L>" if fp8 else "template <int L>"
    scale_d, tail = (f"%{n // 2 + 6}", "1, 1") if fp8 else ("1", "1, 1, 0")
    accumulate = ', "n"(Accumulate ? 1 : 0)' if fp8 else ""
    regs = n // 2
    slots = ", ".join(f"%{i}" for i in range(regs))
    outs = ", ".join(f'"+f"(d[{i}])' for i in range(regs))
    a, b = regs, regs + 4
    return f"""
template <>
struct Wgmma<{ctype}, {n}> {{
  {template}
  static __device__ __forceinline__ void mma(float (&d)[L], const uint32_t (&a)[4], uint32_t desc) {{
    static_assert(L >= {regs}, "accumulator array too short");
    asm volatile(
        "{{\\n.reg .b64 d;\\nmov.b64 d, {{%{b}, %{b + 1}}};\\n"
        "wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{ptx}.{ptx} {{{slots}}}, {{%{a}, %{a + 1}, %{a + 2}, %{a + 3}}}, d, {scale_d}, {tail};\\n}}\\n"
        : {outs}
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(desc), "n"(ptx::kDescriptorHigh){accumulate});
  }}
}};
"""


SHARED_HEAD = """// SPDX-License-Identifier: Apache-2.0
// Written by generate_wgmma.py. D[64 tokens x 128 weight rows] (+)= A[64 x 32] * B[32 x 128], e4m3, both in shared memory in rows of 128 K with the
// 128-byte swizzle.
#pragma once
#include <cstdint>
#include "../ptx/ptx.cuh"

namespace vllm_humming {

"""


def shared_wrapper(n: int) -> str:
    regs = n // 2
    slots = ", ".join(f"%{i}" for i in range(regs))
    outs = ", ".join(f'"+f"(d[{i}])' for i in range(regs))
    return f"""template <bool Accumulate>
__device__ __forceinline__ void wgmma_shared_{n}(float (&d)[{regs}], uint32_t a, uint32_t b) {{
  asm volatile(
      "{{\\n.reg .b64 a, b;\\nmov.b64 a, {{%{regs}, %{regs + 2}}};\\nmov.b64 b, {{%{regs + 1}, %{regs + 2}}};\\n"
      "wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3 {{{slots}}}, a, b, %{regs + 3}, 1, 1;\\n}}\\n"
      : {outs}
      : "r"(a), "r"(b), "n"(ptx::kDescriptorHigh), "n"(Accumulate ? 1 : 0));
}}
"""


def main() -> None:
    if sys.argv[1:] == ["shared"]:
        print(SHARED_HEAD + shared_wrapper(128) + "\n}  // namespace vllm_humming")
        return
    out = HEAD
    for ctype, ptx in (("__nv_bfloat16", "bf16"), ("__half", "f16")):
        for n in WIDTHS:
            out += wrapper(ctype, ptx, n, 16)
    for n in FP8_WIDTHS:
        out += wrapper("__nv_fp8_e4m3", "e4m3", n, 32)
    print(out + "\n}  // namespace vllm_humming")


main()
