# SPDX-License-Identifier: Apache-2.0
"""Checks on a GPU that FP4 linears through the kernels equal the reference: eager, as a CUDA graph and compiled.

usage: PYTHONPATH=. python3 tests/gpu/check_linear.py [--device cpu]
Needs torch, vLLM and the compiled kernels. Every case is one call of the operator that a linear's apply() is.
"""

import argparse
import sys

import torch
from report import Report

import vllm_humming.quant_methods.linear  # noqa: F401  (defines the operator)
from vllm_humming import ops
from vllm_humming.moe.packing import allocate, pack_expert
from vllm_humming.moe.weight_formats import MXFP4, NVFP4, WeightFormat

# N, K: two attention projections, sizes of no tile multiple, and the smallest ones.
SIZES = [(5120, 2048), (2048, 4096), (2880, 2880), (1000, 608), (136, 96), (8, 32), (1, 64)]
ROWS = (1, 2, 7, 16, 33, 64, 100, 256, 1000, 4096)
LIMIT = 4e-3  # one rounding to BF16 of sums in another order


def packed(n: int, k: int, fmt: WeightFormat, dtype: torch.dtype, device: str) -> tuple:
    generator = torch.Generator(device=device)
    generator.manual_seed(n + k)
    draw = {"generator": generator, "device": device, "dtype": torch.uint8}
    codes = torch.randint(0, 256, (n, k // 2), **draw)
    low, high = (0, 0x48) if fmt is NVFP4 else (118, 126)
    scales = torch.randint(low, high, (n, k // fmt.group_k), **draw)
    bias = torch.randn(n, generator=generator, device=device)
    factors = torch.rand(n, generator=generator, device=device) + 0.01 if fmt.has_global else None
    weights = allocate(1, n, k, gated=False, has_bias=True, device=device, weight_format=fmt)
    pack_expert(weights, 0, codes, scales, bias, global_scale=factors, gated=False, dtype=dtype, layer="check")
    return weights.tensors


def graphed(call, x: torch.Tensor) -> torch.Tensor:
    """The call's result from a replay after x was overwritten."""
    fresh = x.clone()
    x.zero_()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(x)
    x.copy_(fresh)
    graph.replay()
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    cuda = device == "cuda"
    if cuda:
        ops.load_kernels()
    report = Report()
    op = torch.ops.vllm_humming.linear
    for fmt in (MXFP4, NVFP4):
        for dtype in (torch.bfloat16, torch.float16):
            report.begin(f"{fmt.label} {str(dtype).removeprefix('torch.')}")
            for n, k in SIZES:
                weights, scale, bias = packed(n, k, fmt, dtype, device)

                def call(x, use_reference=False, bias=bias, n=n, fmt=fmt, weights=weights, scale=scale):
                    return op(x, weights, scale, bias, n, fmt.code, use_reference)

                compiled = torch.compile(call, dynamic=True) if cuda else call
                for rows in ROWS if cuda else ROWS[:4]:

                    def check(rows=rows, k=k, dtype=dtype, call=call, compiled=compiled) -> float:
                        x = torch.randn(rows, k, device=device, dtype=torch.float32).to(dtype)
                        want = call(x, use_reference=True).double()
                        found = call(x)
                        error = float((found.double() - want).norm() / want.norm())
                        assert error < LIMIT, error
                        assert torch.equal(found, call(x))
                        assert torch.equal(found, compiled(x))
                        if cuda:
                            assert torch.equal(found, graphed(call, x))
                        return error

                    report.case(f"N {n} K {k} M {rows}", check)
            report.end()
    sys.exit(bool(report.failures))


if __name__ == "__main__":
    main()
