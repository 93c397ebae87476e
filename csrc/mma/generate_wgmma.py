# SPDX-License-Identifier: Apache-2.0
"""Writes wgmma.cuh: one wrapper for each token width N, because inline PTX needs every accumulator register by name.

usage: python csrc/mma/generate_wgmma.py > csrc/mma/wgmma.cuh
"""

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


def main() -> None:
    out = HEAD
    for ctype, ptx in (("__nv_bfloat16", "bf16"), ("__half", "f16")):
        for n in WIDTHS:
            out += wrapper(ctype, ptx, n, 16)
    for n in FP8_WIDTHS:
        out += wrapper("__nv_fp8_e4m3", "e4m3", n, 32)
    print(out + "\n}  // namespace vllm_humming")


main()
