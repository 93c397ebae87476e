# SPDX-License-Identifier: Apache-2.0
"""Random layers in every weight format, poisoned runs of the op, and the comparison with the float64 oracle."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_humming.moe import fp8, schedule
from vllm_humming.moe.packing import CHUNK_K, PackedProjection, allocate, pack_expert
from vllm_humming.moe.quantize import Quantized, dequantize
from vllm_humming.moe.reference import Activation, oracle_moe
from vllm_humming.moe.weight_formats import MXFP4, WeightFormat

# Relative Frobenius error of a whole layer, and of its worst token (a wrong token must not drown in a large batch).
# With FP8 activations a value of h that lies between two e4m3 numbers may round either way, in any activation dtype.
LIMIT = {("a16", torch.bfloat16): 4e-3, ("a16", torch.float16): 1e-3}
LIMIT |= {("w4a8", torch.bfloat16): 4e-3, ("w4a8", torch.float16): 1e-3}
TOKEN_LIMIT = {("a16", torch.bfloat16): 1.5e-2, ("a16", torch.float16): 4e-3}
TOKEN_LIMIT |= {("w4a8", torch.bfloat16): 1.5e-2, ("w4a8", torch.float16): 4e-3}
FLIP_LIMITS = 8e-3, 6e-2  # FP8 layers whose h the oracle rounds itself
H_ERROR = 4e-3  # of h before its rounding to e4m3, relative to the largest of the block of 128; clamped h shows most
CHUNK_TOKENS = 16384  # larger batches run in chunks, and the workspace holds the last one's h
GUARD_ROWS = 8
GUARD_BYTES = 4096

SPECS = {
    "silu": {"activation": Activation.SWIGLU},
    "silu_limit": {"activation": Activation.SWIGLU, "limit": 0.5},
    "swigluoai": {"activation": Activation.SWIGLU, "alpha": 1.702, "beta": 1.0, "limit": 7.0},
    "gelu_tanh": {"activation": Activation.GELU_TANH},
    "relu2": {"activation": Activation.RELU2},
}


@dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    spec: str = "silu"
    bias: bool = False


@dataclass(frozen=True)
class Layer:
    shape: Shape
    dtype: torch.dtype
    w13: PackedProjection
    w2: PackedProjection
    weight_format: WeightFormat
    dense: tuple  # w13, b13, w2, b2: a list of float32 tensors an expert, or None

    @property
    def options(self) -> dict:
        return SPECS[self.shape.spec]


def random_weights(
    n: int, k: int, weight_format: WeightFormat, gen: torch.Generator, boost: int, parts: int = 1
) -> tuple[Quantized, Tensor | None]:
    """(random FP4 weights [n, k] of about unit gain times 2^boost, their global scales [n] or None).

    parts: rows in as many equal parts, interleaved or not, have global scales of their own.
    """
    device = gen.device
    codes = torch.randint(0, 256, (n, k // 2), generator=gen, device=device, dtype=torch.uint8)
    groups = (n, k // weight_format.group_k)
    if not weight_format.has_global:
        middle = round(127 - math.log2(3.9 * k**0.5)) + boost
        scales = torch.randint(middle - 1, middle + 2, groups, generator=gen, device=device, dtype=torch.uint8)
        return Quantized(codes, scales, None), None
    scales = torch.randint(0x28, 0x38, groups, generator=gen, device=device, dtype=torch.uint8)  # 0.25 to 1
    scales[torch.rand(groups, generator=gen, device=device) < 0.02] = 0
    scales[torch.rand(groups, generator=gen, device=device) < 0.02] = 3  # a subnormal
    gain = 2.0**boost / (2.0 * k**0.5)
    own = gain * (1 + torch.arange(parts, device=device, dtype=torch.float32)) / parts
    return Quantized(codes, scales, own[0]), own


def make_layer(
    shape: Shape, dtype: torch.dtype, device: str, *, seed: int = 0, boost: int = 0, weight_format: WeightFormat = MXFP4
) -> Layer:
    """A layer of about unit gain. boost: weights times 2^boost, which needs row scales from 2^9 on in every format."""
    gen = torch.Generator(device=device).manual_seed(seed)
    act = SPECS[shape.spec]["activation"]
    rows = shape.intermediate * (2 if act.gated else 1)
    make = {"num_experts": shape.experts, "has_bias": shape.bias, "device": device, "weight_format": weight_format}
    w13 = allocate(out_features=rows, in_features=shape.hidden, gated=act.gated, pad_rows_to=CHUNK_K, **make)
    w2 = allocate(out_features=shape.hidden, in_features=shape.intermediate, gated=False, **make)
    dense: tuple[list, list, list, list] = ([], [], [], [])
    for i, (p, n, k, gated) in enumerate(
        [(w13, rows, shape.hidden, act.gated), (w2, shape.hidden, shape.intermediate, False)]
    ):
        order = "interleaved" if gated and shape.spec == "swigluoai" else "packed"
        for expert in range(shape.experts):
            quantized, own = random_weights(n, k, weight_format, gen, boost, 2 if gated else 1)
            per_row = None
            if own is not None:
                per_row = own.repeat(n // len(own)) if order == "interleaved" else own.repeat_interleave(n // len(own))
            bias = torch.randn(n, generator=gen, device=device) * 2.0**boost if shape.bias else None
            pack_expert(
                p, expert, quantized.codes, quantized.scales, bias, gated=gated, gate_up=order, dtype=dtype,
                layer="layer", global_scale=per_row,
            )  # fmt: skip
            if per_row is None:
                w = dequantize(quantized, weight_format, torch.float32)
            else:
                one = quantized._replace(global_scale=torch.ones_like(per_row[0]))
                w = (dequantize(one, weight_format, torch.float64) * per_row[:, None].double()).float()
            dense[2 * i].append(torch.cat([w[0::2], w[1::2]]) if order == "interleaved" else w)
            if bias is not None:
                dense[2 * i + 1].append(torch.cat([bias[0::2], bias[1::2]]) if order == "interleaved" else bias)
    return Layer(shape, dtype, w13, w2, weight_format, tuple(part or None for part in dense))


def guarded(tokens: int, hidden: int, dtype: torch.dtype, device: str) -> Tensor:
    """[tokens + GUARD_ROWS, hidden] of NaN: what lies beyond a batch must be neither used nor written."""
    return torch.full((tokens + GUARD_ROWS, hidden), math.nan, dtype=dtype, device=device)


def batch(tokens: int, layer: Layer, gen: torch.Generator, scale: float = 1.0) -> Tensor:
    """x [tokens, H] in front of NaN rows."""
    x = guarded(tokens, layer.shape.hidden, layer.dtype, str(gen.device))[:tokens]
    return x.copy_(torch.randn(x.shape, generator=gen, device=gen.device) * scale)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [.., K] as the kernels quantise it: (e4m3 [.., K], scales fp32 [.., ceil(K / 128)]); NaN stays NaN."""
    k = x.shape[-1]
    blocks = torch.nn.functional.pad(x.float(), (0, -k % 128)).unflatten(-1, (-1, 128))
    amax = blocks.abs().amax(-1).clamp(min=fp8.SMALLEST_AMAX)
    largest = torch.full_like(amax, fp8.E4M3_MAX)  # tensors on both sides: a true division on every device
    values = (blocks * largest.div(amax)[..., None]).clamp(-fp8.E4M3_MAX, fp8.E4M3_MAX)
    return values.to(torch.float8_e4m3fn).flatten(-2)[..., :k].contiguous(), amax.div(largest)


def padded_intermediate(layer: Layer) -> int:
    return layer.w2.packed.shape[2] * CHUNK_K


def workspace_for(layer: Layer, tokens: int) -> Tensor:
    """uint8 workspace for up to `tokens` tokens, of 0xFF, with a guard behind it that is not part of the view."""
    s = layer.shape
    size = torch.ops.vllm_humming.moe_workspace_bytes(
        tokens, s.top_k, s.experts, s.hidden, padded_intermediate(layer), layer.weight_format.code
    )
    return torch.full((size + GUARD_BYTES,), 255, dtype=torch.uint8, device=layer.w13.packed.device)[:size]


def workspace_parts(layer: Layer, workspace: Tensor, entries: int) -> list[Tensor]:
    """uint8 views of what csrc/moe/layer.cpp puts first in a workspace: h, its scales, the tokens' scales, y, slots."""
    hidden, width, fp8 = layer.shape.hidden, padded_intermediate(layer), layer.weight_format.path == "w4a8"
    scales = [width // 128 * entries * 4, -(-hidden // 128) * entries * 4] if fp8 else [0, 0]
    y = entries * max(2 * hidden, -(-hidden // 128) * 128 if fp8 else 0)
    parts, at = [], 0
    for size in (entries * width * (1 if fp8 else 2), *scales, y, entries * 4):
        parts.append(workspace[at : at + size])
        at += -(-size // 256) * 256
    return parts


def selected_tiles(layer: Layer, tokens: int, top_k: int | None = None) -> tuple[int, int]:
    s = layer.shape
    path = layer.weight_format.path
    return schedule.select(tokens, top_k or s.top_k, s.experts, s.hidden, padded_intermediate(layer), path=path)


def every_tile(layer: Layer) -> list[int]:
    """Indices of the tiles that can run the layer."""
    return schedule.tiles_of(layer.weight_format.path)


def launch(layer, x, weights, ids, out, workspace, tiles, expert_map=None, router_weight_on_input=False) -> None:
    """One call of the op, nothing around it."""
    o = {"alpha": 1.0, "beta": 0.0, "limit": math.inf} | layer.options
    code = layer.weight_format.code
    torch.ops.vllm_humming.moe(
        x, weights, ids, expert_map, *layer.w13.tensors, *layer.w2.tensors, workspace, out, code, int(o["activation"]),
        o["alpha"], o["beta"], o["limit"], router_weight_on_input, *tiles,
    )  # fmt: skip


class Mismatch(Exception):
    """A check that failed."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise Mismatch(message)


def run(layer, x, weights, ids, *, tiles=None, expert_map=None, router_weight_on_input=False) -> Tensor:
    """The op's output after two runs on poisoned buffers, with every guard and the inputs checked."""
    tokens, hidden = x.shape
    tiles = tiles or selected_tiles(layer, tokens, ids.shape[1])
    kept = [t.clone() for t in (x, weights, ids)]
    results = []
    for _ in range(2):
        out = guarded(tokens, hidden, x.dtype, x.device)
        sized = replace(layer, shape=replace(layer.shape, top_k=ids.shape[1]))
        workspace = workspace_for(sized, tokens)
        launch(layer, x, weights, ids, out[:tokens], workspace, tiles, expert_map, router_weight_on_input)
        require(bool(out[tokens:].isnan().all()), "wrote behind out")
        size = workspace.numel()
        tail = workspace.as_strided((GUARD_BYTES,), (1,), size)
        require(bool(tail.eq(255).all()), "wrote behind the workspace")
        results.append(out[:tokens])
    same = [
        torch.equal(t.view(torch.uint8), old.view(torch.uint8)) for t, old in zip((x, weights, ids), kept, strict=True)
    ]
    require(all(same), "an input was written")
    require(torch.equal(*(r.contiguous().view(torch.int16) for r in results)), "two runs differ")
    return results[0]


def compare(layer: Layer, out: Tensor, want: Tensor) -> float:
    """The relative Frobenius error; raises Mismatch past the limits. Tokens that want zero must be exactly zero."""
    if not out.numel():
        return 0.0
    require(bool(out.isfinite().all()), f"{int((~out.isfinite()).sum())} values are not finite")
    norms = want.norm(dim=1)
    idle = norms == 0
    require(bool((out[idle] == 0).all()), "tokens without an expert are not zero")
    total = float(want.norm())
    if total == 0:
        return 0.0
    errors = (out.double() - want).norm(dim=1)
    error = float(errors.norm()) / total
    path = layer.weight_format.path
    limit, token_limit = LIMIT[path, out.dtype], TOKEN_LIMIT[path, out.dtype]
    if path == "w4a8" and out.shape[0] > CHUNK_TOKENS:
        limit, token_limit = FLIP_LIMITS
    require(error <= limit, f"error {error:.2e} > {limit:.1e}")
    floor = total / want.shape[0] ** 0.5 / 4  # a token whose experts cancel is not held to its own norm
    token = float((errors / norms.clamp(min=floor)).max())
    require(token <= token_limit, f"worst token's error {token:.2e} > {token_limit:.1e}")
    return error


def oracle(layer, x, weights, ids, expert_map=None, router_weight_on_input=False, tiles=None) -> Tensor:
    """What the layer should give. FP8 layers: from the kernels' own h, checked by itself, since a value that rounds the
    other way would drown every other error."""
    fp8 = layer.weight_format.path == "w4a8"
    options = {"router_weight_on_input": router_weight_on_input, "fp8_activations": fp8, **layer.options}
    if fp8 and x.is_cuda and 0 < x.shape[0] <= CHUNK_TOKENS:
        tiles = tiles or selected_tiles(layer, x.shape[0], ids.shape[1])
        own = _kernel_h(layer, x, weights, ids, tiles, expert_map, router_weight_on_input)
        options["second_input"] = lambda slots, exact: _checked_h(own[slots], exact)
    return oracle_moe(x, weights, ids, expert_map, *layer.dense, **options)


def in_order(codes: Tensor) -> Tensor:
    """Blocks [.., 128] of e4m3 codes as the kernels keep them (csrc/mma/fp8.cuh, fp8_place), in order of K."""
    k = torch.arange(128, device=codes.device)
    return codes[..., k // 8 % 4 * 32 + k // 4 % 2 * 16 + k // 32 * 4 + k % 4]


def _parts_after_call(
    layer, x, weights, ids, tiles, expert_map=None, router_weight_on_input=False
) -> tuple[Tensor, ...]:
    """(h uint8, scales of h, scales of x, y uint8, slots), flat, of an FP8 layer's last chunk after one call."""
    tokens, top_k = ids.shape
    sized = replace(layer, shape=replace(layer.shape, top_k=top_k))
    workspace, out = workspace_for(sized, tokens), torch.empty_like(x)
    launch(layer, x, weights, ids, out, workspace, tiles, expert_map, router_weight_on_input)
    parts = workspace_parts(layer, workspace, min(tokens, CHUNK_TOKENS) * top_k)
    dtypes = (torch.uint8, torch.float32, torch.float32, torch.uint8, torch.int32)
    return tuple(part.view(dtype) for part, dtype in zip(parts, dtypes, strict=True))


def idle_tokens(tokens: int, hidden: int) -> int:
    """How many tokens at the start of a chunk must have no expert for the others' quantised rows to outlive the layer:
    y, which lies in the same place, is written at their slots only."""
    row = -(-hidden // 128) * 128
    return -(-tokens * row // (row + 2 * hidden))


def quantized_rows(layer, x, weights, ids, tiles, expert_map, local: int) -> tuple[Tensor, Tensor, Tensor]:
    """What an FP8 layer made of x: (slots int32 [local], codes e4m3 [local, whole blocks of H] in order of K, scales
    fp32 [local, blocks]) of the last chunk, whose first idle_tokens have no expert. local: its slots that have one."""
    tokens, (top_k, hidden) = x.shape[0], (ids.shape[1], x.shape[1])
    blocks, entries = -(-hidden // 128), ((tokens - 1) % CHUNK_TOKENS + 1) * top_k
    _, _, scales, y, slots = _parts_after_call(layer, x, weights, ids, tiles, expert_map)
    codes = in_order(y[: local * blocks * 128].view(local, blocks, 128)).view(torch.float8_e4m3fn)
    scales = scales[: blocks * entries].view(blocks, entries).T[:local]
    return slots[:local], codes.flatten(1), scales


def _kernel_h(layer, x, weights, ids, tiles, expert_map, router_weight_on_input) -> Tensor:
    """h as the second GEMM of an FP8 layer reads it, float64 [slots, I], from the workspace (csrc/moe/layer.cpp)."""
    tokens, top_k = ids.shape
    entries, width = tokens * top_k, padded_intermediate(layer)
    codes, scales, _, _, slots = _parts_after_call(layer, x, weights, ids, tiles, expert_map, router_weight_on_input)
    values = in_order(codes.view(entries, width // 128, 128)).view(torch.float8_e4m3fn).double()
    values = (values * scales.view(-1, entries).T.double()[:, :, None]).view(entries, width)
    rows = int((slots >= 0).sum())  # poison is -1
    own = torch.full((entries, width), math.nan, dtype=torch.float64, device=x.device)
    own[slots[:rows].long()] = values[:rows]
    return own[:, : layer.shape.intermediate]


def _checked_h(own: Tensor, exact: Tensor) -> Tensor:
    """own, if it is exact rounded to e4m3 but for an error of H_ERROR times the block's largest value before that."""
    k = exact.shape[1]
    amax = torch.nn.functional.pad(exact.abs(), (0, -k % 128)).unflatten(1, (-1, 128)).amax(2)
    amax = amax.repeat_interleave(128, 1)[:, :k].clamp(min=1e-30)
    exponent = torch.frexp((exact * 448 / amax).abs().clamp(min=2.0**-6)).exponent - 1
    half_step = amax / 448 * torch.ldexp(torch.ones_like(exact), exponent - 4)
    finite = exact.isfinite().all(1)  # a row with a NaN is checked by what comes out
    beyond = ((own - exact).abs() - half_step) / amax
    worst = float(beyond[finite].max()) if bool(finite.any()) else 0.0
    require(
        worst <= H_ERROR,
        f"h is off by {worst:.1e} of its block's largest value beside its rounding, more than {H_ERROR}",
    )
    return own
