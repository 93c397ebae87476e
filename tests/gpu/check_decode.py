# SPDX-License-Identifier: Apache-2.0
"""Checks on a GPU that the kernels decode weights exactly: identity activations must return them bit for bit.

usage: PYTHONPATH=. python3 tests/gpu/check_decode.py [--device cpu]
MXFP4, also for FP8: every code x every e8m0 byte 0..254, rows that span the whole exact window. NVFP4: every code x
every e4m3 byte, zero and subnormals included, in every place. Every compiled tile of the path, bf16 and fp16. What the
output dtype cannot hold must come out as the exact value rounded once. Before that: packing there and loading through
pinned memory against packing and loading on the CPU. Needs torch and the compiled kernels, not vLLM.
"""

import argparse
import math
import sys
from itertools import product

import torch
from torch import Tensor

from vllm_humming import ops
from vllm_humming.moe import schedule
from vllm_humming.moe.layouts import GemmLayout
from vllm_humming.moe.packing import allocate, pack_expert
from vllm_humming.moe.quantize import Quantized, dequantize
from vllm_humming.moe.weight_formats import MXFP4, MXFP4_FP8, NVFP4, WeightFormat
from vllm_humming.quant_methods.loading import ExpertLoader, ExpertShape
from vllm_humming.quant_methods.schemes import MODELOPT_NVFP4, PLAIN_MXFP4

SPANS = {torch.bfloat16: 133, torch.float16: 24}
FP8_SPAN = 11
GUARD_ROWS = 4


def every_code_and_byte(device: str) -> tuple[Tensor, Tensor]:
    """[64, 128]: 256 groups, group i with scale byte min(i, 254) and every code twice."""
    codes = torch.arange(32, device=device).remainder(16).roll(5)
    packed = (codes[0::2] | codes[1::2] << 4).to(torch.uint8)
    return packed.repeat(64, 4), torch.arange(256, device=device).clamp(max=254).view(64, 4).to(torch.uint8)


def permuted_bytes(device: str, gen: torch.Generator) -> tuple[Tensor, Tensor]:
    """[256, 128]: random codes; the four groups of a row hold neighbouring bytes, so every byte meets every place."""
    codes = torch.randint(0, 256, (256, 64), generator=gen, device=device, dtype=torch.uint8)
    scales = torch.arange(256, device=device)[:, None] + torch.arange(4, device=device)
    return codes, scales.clamp(max=254).to(torch.uint8)


def window_rows(n: int, k: int, span: int, device: str, gen: torch.Generator) -> tuple[Tensor, Tensor]:
    """[n, k]: random codes; each row's scales are spread over the whole exact window below a random top."""
    codes = torch.randint(0, 256, (n, k // 2), generator=gen, device=device, dtype=torch.uint8)
    codes |= 0x11  # no zeros, so that every group counts for the row's window
    top = torch.randint(span, 255, (n, 1), generator=gen, device=device)
    below = torch.randint(0, span + 1, (n, k // 32), generator=gen, device=device)
    below[:, 0], below[:, -1] = 0, span
    return codes, (top - below).to(torch.uint8)


def e4m3_every_code_and_byte(device: str) -> tuple[Tensor, Tensor]:
    """[128, 256]: 2048 groups, every code once, each scale byte 0..126 in every one of the 16 places of a row."""
    codes = torch.arange(16, device=device).roll(3)
    packed = (codes[0::2] | codes[1::2] << 4).to(torch.uint8)
    scales = (torch.arange(128, device=device)[:, None] + torch.arange(16, device=device)).remainder(127)
    return packed.repeat(128, 16), scales.to(torch.uint8)


def e4m3_random(n: int, k: int, device: str, gen: torch.Generator) -> tuple[Tensor, Tensor]:
    """[n, k] of random codes and scale bytes 0..126."""
    codes = torch.randint(0, 256, (n, k // 2), generator=gen, device=device, dtype=torch.uint8)
    return codes, torch.randint(0, 127, (n, k // 16), generator=gen, device=device, dtype=torch.uint8)


def decoded(
    codes: Tensor, scales: Tensor, fmt: WeightFormat, dtype: torch.dtype, tile: int, first: int, tokens: int
) -> Tensor:
    """Columns first..first + tokens of the weights as the GEMM returns them for rows of the identity: [tokens, N]."""
    n, k, device = codes.shape[0], codes.shape[1] * 2, codes.device
    p = allocate(1, n, k, gated=False, has_bias=False, device=device, weight_format=fmt)
    one = torch.ones((), device=device) if fmt.has_global else None
    pack_expert(p, 0, codes, scales, None, gated=False, dtype=dtype, layer="decode", global_scale=one)
    x = torch.zeros((tokens, k), dtype=dtype, device=device)
    x[torch.arange(tokens), torch.arange(first, first + tokens)] = 1
    out = torch.full((tokens + GUARD_ROWS, n), math.nan, dtype=dtype, device=device)
    size = torch.ops.vllm_humming.grouped_gemm_workspace_bytes(tokens, 1, k, fmt.code, GemmLayout.CONTIGUOUS)
    workspace = torch.empty(size, dtype=torch.uint8, device=device)
    torch.ops.vllm_humming.grouped_gemm(
        x, None, *p.tensors, None, None, workspace, out[:tokens], GemmLayout.CONTIGUOUS, fmt.code, tile
    )
    if not bool(out[tokens:].isnan().all()):
        raise AssertionError("wrote behind out")
    return out[:tokens]


def wrong(
    codes: Tensor, scales: Tensor, fmt: WeightFormat, dtype: torch.dtype, tile: int, first: int, tokens: int
) -> str:
    """Empty when every value is exact, else a description of the first that is not."""
    one = torch.ones((), device=codes.device) if fmt.has_global else None
    weights = dequantize(Quantized(codes, scales, one), fmt, torch.float64)
    want = weights[:, first : first + tokens].T.to(dtype)
    got = decoded(codes, scales, fmt, dtype, tile, first, tokens)
    bad = got.ne(want) | got.isnan()
    if not bool(bad.any()):
        return ""
    token, row = bad.nonzero()[0].tolist()
    k = first + token
    byte = int(codes[row, k // 2])
    code, scale = byte >> 4 if k % 2 else byte & 15, int(scales[row, k // fmt.group_k])
    return (
        f"{int(bad.sum())} of {bad.numel()} values; row {row}, k {k}, code {code}, scale byte {scale}: "
        f"{got[token, row].item()} instead of {want[token, row].item()}"
    )


def packing_inputs(
    fmt: WeightFormat, n: int, k: int, has_bias: bool, kind: str, gen: torch.Generator
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Codes, scales, bias and global scale of one of PACKING_KINDS; groups of zeros among them."""
    groups = k // fmt.group_k
    codes = torch.randint(0, 256, (n, k // 2), generator=gen, dtype=torch.uint8)
    codes.view(n, groups, -1)[torch.rand(n, groups, generator=gen) < 0.2] &= 0x88
    low, high = (0, 127) if fmt.has_global else (100, 115)
    scales = torch.randint(low, high, (n, groups), generator=gen, dtype=torch.uint8)
    if fmt.has_global:
        scales[torch.rand(n, groups, generator=gen) < 0.1] = 0x80  # -0.0
    elif kind != "plain":
        scales = torch.randint(90, 112, (n, groups), generator=gen, dtype=torch.uint8)  # FP8: some are rounded
        scales[::3] += 30  # 16 bits: above the window
        scales[1::3] -= 85  # FP16: below it
    bias = torch.randn(n, generator=gen) if has_bias else None
    factor = torch.rand(1 if kind == "plain" else n, generator=gen) + 0.5 if fmt.has_global else None
    row = n - 2
    if kind == "bad scale":
        scales[row, groups - 1], scales[n - 1, 0] = 255, 255
    elif kind == "bad bias" and bias is not None:
        bias[row] = math.nan
    elif kind == "bad global" and factor is not None:
        factor[row], factor[n - 1] = -1.0, 2.0**120
    elif kind == "bad window":
        codes[row], scales[row, 0], scales[row, 1] = 0x11, 1, 250
    return codes, scales, bias, factor


PACKING_KINDS = ("plain", "wide", "bad scale", "bad bias", "bad global", "bad window")


def check_packing(device: str) -> int:
    """pack_rows against its definition on the CPU, byte for byte, on what held other weights before: the packed
    weights, what was rounded, and what is refused, which leaves them as they were; failures.
    """
    gen = torch.Generator().manual_seed(1)
    failures = cases = refused = rounded = 0
    for fmt, dtype, (n, k), has_bias, kind in product(
        (MXFP4, NVFP4, MXFP4_FP8),
        SPANS,
        ((64, 128), (200, 352), (736, 2880), (2048, 1024)),
        (False, True),
        PACKING_KINDS,
    ):
        for gated, gate_up in ((False, "packed"), (True, "packed"), (True, "interleaved")):
            source = packing_inputs(fmt, n, k, has_bias, kind, gen)
            results, told = [], []
            for place in ("cpu", device):
                make = {"gated": gated, "has_bias": has_bias, "device": place, "weight_format": fmt}
                weights = allocate(2, n, k, **make)
                for t in weights.tensors:
                    if t is not None:
                        t.copy_(torch.full_like(t, 77))
                codes, scales, bias, factor = (t if t is None else t.to(place) for t in source)
                try:
                    rounding = pack_expert(
                        weights,
                        1,
                        codes,
                        scales,
                        bias,
                        global_scale=factor,
                        gated=gated,
                        gate_up=gate_up,
                        dtype=dtype,
                        layer="check",
                    )
                    told.append(str(rounding))
                    rounded += rounding.groups > 0
                except ValueError as error:
                    told.append(str(error))
                    refused += 1
                results.append([t.cpu() for t in weights.tensors if t is not None])
            cases += 1
            if told[0] != told[1] or not all(torch.equal(*pair) for pair in zip(*results, strict=True)):
                failures += 1
                print(f"FAIL packing {fmt.label} {dtype} {n}x{k} bias {has_bias} gated {gated} {gate_up} {kind}")
                print(*told, sep="\n")
    print(
        f"packing on the {device} equals the CPU's byte for byte: {cases - failures} of {cases}, "
        f"{refused // 2} of them refusals, {rounded // 2} rounded",
        flush=True,
    )
    return failures


def check_loading(device: str) -> int:
    """An ExpertLoader whose weights lie on the device against one on the CPU: host tensors larger than a staging slot,
    many experts one after the other, and an error in one of them; failures.
    """
    gen, failures = torch.Generator().manual_seed(2), 0
    experts, hidden, intermediate = 6, 7168, 2432  # w13 is 17 MB
    for scheme, fmt in ((PLAIN_MXFP4, MXFP4), (MODELOPT_NVFP4, NVFP4), (PLAIN_MXFP4, MXFP4_FP8)):
        loaders, told = [], []
        sources = {
            shard: [packing_inputs(fmt, rows, k, False, "wide", gen) for _ in range(experts)]
            for shard, rows, k in (
                ("w1", intermediate, hidden),
                ("w2", hidden, intermediate),
                ("w3", intermediate, hidden),
            )
        }
        sources["w2"][experts - 2][1][11, 3] = 255
        for place in ("cpu", device):
            make = {"has_bias": False, "device": place, "weight_format": fmt}
            packed = {
                "w13": allocate(experts, 2 * intermediate, hidden, gated=True, **make),
                "w2": allocate(experts, hidden, intermediate, gated=False, **make),
            }
            shape = ExpertShape(experts, hidden, intermediate, intermediate, 0, True, False, False)
            loader = ExpertLoader("check", scheme, shape, packed, torch.bfloat16)
            loaders.append(loader)
            messages = []
            for expert, shard in product(range(experts), sources):
                codes, scales, _, factor = sources[shard][expert]
                for kind, tensor in (("codes", codes), ("scales", scales), ("global", factor)):
                    if tensor is not None:
                        value = tensor[:1] if kind == "global" else tensor
                        try:
                            loader.load("w2" if shard == "w2" else "w13", kind, value, shard, expert)
                        except ValueError as error:
                            messages.append(str(error))
            messages.append(str(loader.rounding))
            told.append(messages)
        pairs = [
            (a.cpu(), b.cpu())
            for name in ("w13", "w2")
            for a, b in zip(loaders[0].packed[name].tensors, loaders[1].packed[name].tensors, strict=True)
            if a is not None
        ]
        same = all(torch.equal(*pair) for pair in pairs)
        if not same or told[0] != told[1] or len(told[0]) != 2:
            failures += 1
            print(f"FAIL loading {fmt.label}: weights {'equal' if same else 'differ'}", *told, sep="\n")
    print(f"loading from the host to the {device} equals the CPU's: {3 - failures} of 3 formats", flush=True)
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    device = parser.parse_args().device
    if device == "cuda":
        ops.load_kernels()
    gen = torch.Generator(device=device).manual_seed(0)
    failures = check_packing(device) + check_loading(device)
    for dtype, span in SPANS.items():
        cases = {
            "every code x byte": (MXFP4, *every_code_and_byte(device)),
            "bytes in every place": (MXFP4, *permuted_bytes(device, gen)),
            "window rows 192x288": (MXFP4, *window_rows(192, 288, span, device, gen)),
            "window rows 736x2880": (MXFP4, *window_rows(736, 2880, span, device, gen)),
            "window rows 2880x736": (MXFP4, *window_rows(2880, 736, span, device, gen)),
            "FP8 every code x byte": (MXFP4_FP8, *every_code_and_byte(device)),
            "FP8 bytes in every place": (MXFP4_FP8, *permuted_bytes(device, gen)),
            "FP8 rows 192x288": (MXFP4_FP8, *window_rows(192, 288, FP8_SPAN, device, gen)),
            "FP8 rows 736x2880": (MXFP4_FP8, *window_rows(736, 2880, FP8_SPAN, device, gen)),
            "FP8 rows 2880x736": (MXFP4_FP8, *window_rows(2880, 736, FP8_SPAN, device, gen)),
            "e4m3 every code x byte": (NVFP4, *e4m3_every_code_and_byte(device)),
            "e4m3 rows 736x2880": (NVFP4, *e4m3_random(736, 2880, device, gen)),
            "e4m3 rows 2880x736": (NVFP4, *e4m3_random(2880, 736, device, gen)),
        }
        for name, (fmt, codes, scales) in cases.items():
            k = codes.shape[1] * 2
            values = 0
            tiles = schedule.tiles_of(fmt.path)
            for tile in tiles:
                for first, tokens in ((0, k), (k - 13, 13), (1, 1)):
                    values += tokens * codes.shape[0]
                    problem = wrong(codes, scales, fmt, dtype, tile, first, tokens)
                    if problem:
                        failures += 1
                        print(f"FAIL {name} {dtype} tile {schedule.TILES[tile].name} tokens {tokens}: {problem}")
            print(f"{name:<24} {dtype!s:<15} {len(tiles)} tiles  {values:>10} values compared", flush=True)
    print(f"{failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
