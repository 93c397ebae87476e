# SPDX-License-Identifier: Apache-2.0
"""Writes wgmma.cuh: one wrapper for each token width N, because inline PTX needs every accumulator register by name.

usage: python csrc/mma/generate_wgmma.py > csrc/mma/wgmma.cuh
"""

WIDTHS = (16, 32, 40, 48, 64, 80, 96, 128, 160)  # what the tiles use (csrc/moe/tiles)

HEAD = """// SPDX-License-Identifier: Apache-2.0
// Written by generate_wgmma.py. D[64 weight rows x N tokens] += A[64 x 16] (registers) * B[16 x N] (shared memory, K-major).
#pragma once
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "../ptx/ptx.cuh"

namespace vllm_humming {

template <typename T, int N>
struct Wgmma;
"""


def wrapper(ctype: str, ptx: str, n: int) -> str:
    regs = n // 2
    slots = ", ".join(f"%{i}" for i in range(regs))
    outs = ", ".join(f'"+f"(d[{i}])' for i in range(regs))
    a, b = regs, regs + 4
    return f"""
template <>
struct Wgmma<{ctype}, {n}> {{
  template <int L>
  static __device__ __forceinline__ void mma(float (&d)[L], const uint32_t (&a)[4], uint32_t desc) {{
    static_assert(L >= {regs}, "accumulator array too short");
    asm volatile(
        "{{\\n.reg .b64 d;\\nmov.b64 d, {{%{b}, %{b + 1}}};\\n"
        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{ptx}.{ptx} {{{slots}}}, {{%{a}, %{a + 1}, %{a + 2}, %{a + 3}}}, d, 1, 1, 1, 0;\\n}}\\n"
        : {outs}
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(desc), "n"(ptx::kDescriptorHigh));
  }}
}};
"""


def main() -> None:
    out = HEAD
    for ctype, ptx in (("__nv_bfloat16", "bf16"), ("__half", "f16")):
        for n in WIDTHS:
            out += wrapper(ctype, ptx, n)
    print(out + "\n}  // namespace vllm_humming")


main()
