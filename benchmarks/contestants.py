# SPDX-License-Identifier: Apache-2.0
"""What gemm.py times: this package's grouped GEMM, the peers that are installed, and dense cuBLAS.

Every contestant is a function (gemm, fmt, options) that makes its weights and returns a function from routed rows to
calls. It raises LeftOut with the reason where it is not installed or has no kernel for that GEMM.
"""

import importlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, Literal

import torch
from packed_weights import random_projection
from protocol import WEIGHT_BYTES
from routing import route
from torch import Tensor

from vllm_humming.moe import fp8, schedule
from vllm_humming.moe.weight_formats import WEIGHT_FORMATS


class LeftOut(Exception):
    """Why a contestant does not take part."""


@dataclass(frozen=True)
class Gemm:
    """One GEMM of a MoE layer, or with one expert that of a linear layer: weights [experts, n, k].

    gathered: every token's row is used top_k times, as in the first GEMM of a layer; else each of the M x top_k result
    rows has a row of its own.
    """

    set: str
    name: str
    n: int
    k: int
    experts: int = 1
    top_k: int = 1
    gathered: bool = True

    @property
    def is_linear(self) -> bool:
        return self.experts == 1


def _layer(name: str, up: tuple[int, int], down: tuple[int, int], experts: int, top_k: int) -> list[Gemm]:
    return [Gemm(name, "up", *up, experts, top_k), Gemm(name, "down", *down, experts, top_k, gathered=False)]


SETS: dict[str, list[Gemm]] = {
    "seed1": _layer("seed1", (4096, 6144), (6144, 2048), 32, 8),
    "seed2": _layer("seed2", (6144, 3584), (3584, 3072), 12, 8),
    "qwen3-30b-a3b": _layer("qwen3-30b-a3b", (1536, 2048), (2048, 768), 128, 8),
    "gpt-oss-20b": _layer("gpt-oss-20b", (5760, 2880), (2880, 2880), 32, 4),
    "deepseek-ep8": _layer("deepseek-ep8", (4096, 7168), (7168, 2048), 32, 8),
    "e256": _layer("e256", (4096, 7168), (7168, 2048), 256, 8),
    "linear": [Gemm("linear", f"{n}x{k}", n, k) for n, k in ((4096, 4096), (8192, 8192), (2560, 9728), (6144, 1536))],
}


class Rows:
    """The rows of one point, the same for every contestant.

    ids int32 [M, top_k]. slots int64 [R]: the slots (token * top_k + i) sorted by expert. offsets int32 [E + 1]: where
    each expert's rows begin. source int32 [R]: the row of x that each sorted row reads. x: [M, K] or, where the GEMM
    is not gathered, [R, K] by slot.
    """

    def __init__(
        self, gemm: Gemm, tokens: int, routing: str, dtype: torch.dtype = torch.bfloat16, device: str = "cuda"
    ) -> None:
        gen = torch.Generator(device=device).manual_seed(tokens)
        self.gemm, self.tokens, self.routing = gemm, tokens, routing
        self.weights, self.ids = route(tokens, gemm.experts, gemm.top_k, routing, gen)
        flat = self.ids.flatten().long()
        self.slots = flat.argsort(stable=True)
        self.counts = flat.bincount(minlength=gemm.experts)
        self.offsets = torch.nn.functional.pad(self.counts.cumsum(0), (1, 0)).int()
        self.source = (self.slots // gemm.top_k if gemm.gathered else self.slots).int()
        self.active = int(self.counts.count_nonzero())
        self.total = flat.numel()
        self.x = torch.randn(
            tokens if gemm.gathered else self.total, gemm.k, generator=gen, device=device, dtype=torch.float32
        ).to(dtype)

    @property
    def flops(self) -> int:
        return 2 * self.total * self.gemm.n * self.gemm.k

    def row_bytes(self, element: int) -> int:
        """Bytes of x, in elements of that size, and of the 16-bit result."""
        return self.x.numel() * element + 2 * self.total * self.gemm.n

    @cached_property
    def x_sorted(self) -> Tensor:
        return self.x[self.source]

    @cached_property
    def x_fp8(self) -> tuple[Tensor, Tensor]:
        """x as e4m3 and its scales fp32 [rows, ceil(K / 128)]."""
        parts = [fp8.quantize_activations(part) for part in self.x.split(8192)]
        values, scales = zip(*parts, strict=True)
        return torch.cat([part.to(torch.float8_e4m3fn) for part in values]), torch.cat(scales)

    @cached_property
    def x_fp8_sorted(self) -> tuple[Tensor, Tensor]:
        values, scales = self.x_fp8
        return values.view(torch.uint8)[self.source].view(torch.float8_e4m3fn), scales[self.source]

    def aligned(self, block: int) -> tuple[Tensor, Tensor, Tensor]:
        """(slots, experts of the blocks, number of slots): each expert's slots filled up to whole blocks with R."""
        blocks = (self.counts + block - 1) // block
        first = (blocks.cumsum(0) - blocks) * block - self.offsets[:-1]  # what sorted rows of an expert move by
        place = torch.arange(self.total, device=self.ids.device) + first.repeat_interleave(self.counts)
        padded = int(blocks.sum()) * block
        slots = torch.full((padded,), self.total, dtype=torch.int32, device=self.ids.device)
        slots[place] = self.slots.int()
        experts = torch.arange(len(blocks), device=self.ids.device, dtype=torch.int32).repeat_interleave(blocks)
        return slots, experts, torch.tensor(padded, dtype=torch.int32, device=self.ids.device)


@dataclass(frozen=True)
class Call:
    """One way to run a point. The result is in `out` or, where that is None, returned by run(). `out` is filled with
    NaN before the first call, so that rows which nobody wrote show. valid: the rows of it that count, all if None.

    role: "ours"; "sweep", a tile that was not selected; "peer", with the same weights; "roof", what is not the same
    work: weights of 8 or 16 bits. weight_bytes: of the weights it reads.
    """

    label: str
    role: Literal["ours", "sweep", "peer", "roof"]
    run: Callable[[], Tensor | None]
    weight_bytes: float
    out: Tensor | None = None
    valid: Tensor | None = None
    tile: str = ""
    version: str = ""


@dataclass(frozen=True)
class Options:
    """tiles: what --tiles says, None for the selected tile. m_major: FP8 token scales with the tokens together."""

    tiles: str | int | None = None
    m_major: bool = False
    device: str = "cuda"


Calls = Callable[[Rows], Iterator[Call]]


def installed(distribution: str, module: str) -> tuple[ModuleType, str]:
    """An optional package's module and version; LeftOut where there is none."""
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise LeftOut(f"{module} does not import: {error}") from error
    try:
        return found, version(distribution)
    except PackageNotFoundError:
        return found, str(getattr(found, "__version__", "unknown"))


def m_major(scales: Tensor) -> Tensor:
    """Scales [M, K/128] with M together in memory, padded to whole fours, as their transposed view."""
    rows, blocks = scales.shape
    stored = scales.new_zeros(blocks, -(-rows // 4) * 4)
    stored[:, :rows] = scales.T
    return stored.T[:rows]


def _active_bytes(rows: Rows, fmt: str) -> float:
    return rows.active * rows.gemm.n * rows.gemm.k * WEIGHT_BYTES[fmt]


def ours(gemm: Gemm, fmt: str, options: Options) -> Calls:
    """torch.ops.vllm_humming.grouped_gemm, rows sorted by expert (contiguous) or through a row list (indexed)."""
    from vllm_humming import __version__
    from vllm_humming.moe.layouts import GemmLayout

    weights = random_projection(gemm.experts, gemm.n, gemm.k, fmt, device=options.device)
    path, code = WEIGHT_FORMATS[fmt].path, WEIGHT_FORMATS[fmt].code
    op, workspace_bytes = torch.ops.vllm_humming.grouped_gemm, torch.ops.vllm_humming.grouped_gemm_workspace_bytes

    def tiles(rows: Rows, gathered: bool) -> list[tuple[int, Literal["ours", "sweep"]]]:
        if isinstance(options.tiles, int):
            return [(options.tiles, "ours")]
        chosen = schedule.select_gemm(rows.total, gemm.experts, gemm.n, gemm.k, path, gathered=gathered)
        others = [tile for tile in schedule.tiles_of(path) if tile != chosen] if options.tiles == "sweep" else []
        return [(chosen, "ours"), *((tile, "sweep") for tile in others)]

    def calls(rows: Rows) -> Iterator[Call]:
        for name in ("contiguous",) if gemm.is_linear else ("contiguous", "indexed"):
            layout, gathered = int(GemmLayout[name.upper()]), name == "indexed"
            if path == "w4a8":
                x, scale = rows.x_fp8 if gathered else rows.x_fp8_sorted
                scale = m_major(scale) if options.m_major else scale
            else:
                x, scale = rows.x if gathered else rows.x_sorted, None
            groups, source = None if gemm.is_linear else rows.offsets, rows.source if gathered else None
            size = workspace_bytes(rows.total, gemm.experts, gemm.k, code, layout)
            workspace = torch.empty(size, dtype=torch.uint8, device=x.device)
            out = torch.empty((rows.total, gemm.n), dtype=rows.x.dtype, device=x.device)
            for tile, role in tiles(rows, gathered):
                yield Call(
                    "ours" if gemm.is_linear else f"ours-{name}",
                    role,
                    partial(op, x, scale, *weights.tensors, groups, source, workspace, out, layout, code, tile),
                    _active_bytes(rows, fmt),
                    out,
                    tile=schedule.TILES[tile].name,
                    version=__version__,
                )

    return calls


HUMMING_PATHS = {
    "mxfp4": ({"dtype": "float4e2m1", "group_size": 32, "scale_dtype": "float8e8m0"}, "bfloat16", 0),
    "nvfp4": (
        {"dtype": "float4e2m1", "group_size": 16, "scale_dtype": "float8e4m3", "weight_scale_2_type": "tensor"},
        "bfloat16",
        0,
    ),
    "mxfp4_fp8": ({"dtype": "float4e2m1", "group_size": 32, "scale_dtype": "float8e8m0"}, "float8e4m3", 128),
}


def humming(gemm: Gemm, fmt: str, options: Options) -> Calls:
    """humming-kernels' own layer: indexed and grouped_contiguous, or dense, with the configuration its tuning picks."""
    _, release = installed("humming-kernels", "humming")
    from humming import ops
    from humming.layer import HummingLayer
    from humming.tune import get_heuristics_config

    weight_config, input_dtype, input_group = HUMMING_PATHS[fmt]
    with torch.device(options.device):
        layer = HummingLayer(
            shape_n=gemm.n,
            shape_k=gemm.k,
            num_experts=None if gemm.is_linear else gemm.experts,
            weight_config=dict(weight_config),
            input_config={"dtype": input_dtype, "group_size": input_group},
            torch_dtype=torch.bfloat16,
        ).to(options.device)
    for parameter in layer.parameters():
        data = parameter.data
        if data.dtype == torch.int32:
            data.random_(-(2**31), 2**31 - 1)
        elif data.dtype == torch.float8_e8m0fnu:
            data.view(torch.uint8).random_(118, 123)
        elif data.dtype == torch.float8_e4m3fn:
            data.view(torch.uint8).random_(0x30, 0x3C)  # 0.5..1.375
        else:
            data.fill_(0.01)
    layer.transform()
    quantised, m_major_scales = input_group > 0, options.m_major and input_group > 0

    def calls(rows: Rows) -> Iterator[Call]:
        for kind in ("dense",) if gemm.is_linear else ("indexed", "grouped_contiguous"):
            tuning = get_heuristics_config(
                layer.humming_config,
                shape_m=rows.total,
                gemm_type=kind,
                use_m_major_input_scale=m_major_scales,
            )
            x, scale = rows.x_sorted if kind == "grouped_contiguous" else rows.x, None
            if quantised:
                x, by_group, by_token = ops.process_input(
                    x,
                    quant_mode=layer.humming_config.input_quant_mode.value,
                    quant_dtype=input_dtype,
                    quant_group_size=input_group,
                    group_scale_dtype=str(layer.humming_config.as_dtype),
                    use_m_major_input_scale=m_major_scales,
                )
                scale = by_token if by_group is None else by_group
            lists: dict[str, Any] = {}
            if kind == "indexed":
                slots, experts, padded = rows.aligned(tuning["block_shape"][0])
                lists = dict(sorted_ids=slots, expert_ids=experts, num_tokens_padded=padded)
            elif kind == "grouped_contiguous":
                lists = dict(expert_layout=rows.offsets.long())
            out = torch.empty((rows.total, gemm.n), dtype=torch.bfloat16, device=x.device)
            run = partial(
                layer,
                inputs=x,
                outputs=out,
                input_scale=scale,
                compute_config=json.dumps({"gemm_type": kind, "use_m_major_input_scale": m_major_scales}),
                tuning_config=json.dumps(tuning),
                top_k=gemm.top_k if gemm.gathered and kind == "indexed" else 1,
                **lists,
            )
            tile = "x".join(map(str, tuning["block_shape"]))
            label = f"humming-{kind.removesuffix('_contiguous')}"
            yield Call(label, "peer", run, _active_bytes(rows, fmt), out, tile=tile, version=release)

    return calls


def _marlin_weights(gemm: Gemm, fmt: str, device: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Random weights of Marlin's own layout: int32 [E, K/16, 2 N], scales [E, K/group, N], global scales [E]."""
    if fmt == "mxfp4_fp8":
        raise LeftOut("Marlin has no FP8 activations on SM90")
    if (gemm.n % 64 or gemm.k % 128) and (gemm.n % 128 or gemm.k % 64):
        raise LeftOut(f"Marlin has no tiles for N {gemm.n}, K {gemm.k} without padding")
    group, dtype = (32, torch.float8_e8m0fnu) if fmt == "mxfp4" else (16, torch.float8_e4m3fn)
    codes = torch.empty((gemm.experts, gemm.k // 16, 2 * gemm.n), dtype=torch.int32, device=device)
    scales = torch.empty((gemm.experts, gemm.k // group, gemm.n), dtype=torch.uint8, device=device)
    scales.random_(*((118, 123) if fmt == "mxfp4" else (0x30, 0x3C)))
    factors = None if fmt == "mxfp4" else torch.full((gemm.experts,), 2.0**100, device=device, dtype=torch.float32)
    return codes.random_(-(2**31), 2**31 - 1), scales.view(dtype), factors


def marlin(gemm: Gemm, fmt: str, options: Options) -> Calls:
    """vLLM's Marlin: moe_wna16_marlin_gemm on lists of moe_align_block_size, or its linear layer."""
    _, release = installed("vllm", "vllm")
    from vllm import _custom_ops as vllm_ops
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_make_workspace_new
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import apply_fp4_marlin_linear
    from vllm.scalar_type import scalar_types

    codes, scales, factors = _marlin_weights(gemm, fmt, options.device)
    workspace = marlin_make_workspace_new(torch.empty(0, device=options.device).device, 4)

    def linear(rows: Rows) -> Iterator[Call]:
        def run() -> Tensor:
            return apply_fp4_marlin_linear(rows.x, codes[0], scales[0], factors, workspace, gemm.n, gemm.k)

        yield Call("marlin", "peer", run, _active_bytes(rows, fmt), version=release)

    def grouped(rows: Rows) -> Iterator[Call]:
        # vLLM's own rule for the height of a block
        block = next((b for b in (8, 16, 32, 48) if rows.total / gemm.experts / b < 0.9), 64)
        slots, experts, padded = moe_align_block_size(rows.ids, block, gemm.experts)
        top_k = gemm.top_k if gemm.gathered else 1
        out = torch.empty((rows.total, gemm.n), dtype=rows.x.dtype, device=options.device)

        def run() -> None:
            vllm_ops.moe_wna16_marlin_gemm(
                rows.x, out, codes, None, scales, None, factors, None, None, None, workspace,
                slots, experts, padded, rows.weights,
                moe_block_size=block, top_k=top_k, mul_topk_weights=False, b_q_type=scalar_types.float4_e2m1f,
                size_m=rows.x.shape[0], size_n=gemm.n, size_k=gemm.k, is_k_full=True, use_atomic_add=False,
                use_fp32_reduce=True, is_zp_float=False,
            )  # fmt: skip

        yield Call("marlin", "peer", run, _active_bytes(rows, fmt), out, tile=str(block), version=release)

    return linear if gemm.is_linear else grouped


def triton(gemm: Gemm, fmt: str, options: Options) -> Calls:
    """matmul_ogs of the triton_kernels that vLLM runs gpt-oss with: gathered, or on rows sorted by expert."""
    if fmt != "mxfp4" or gemm.is_linear:
        raise LeftOut("Triton's kernels are for MXFP4 experts on 16-bit activations")
    _, release = installed("vllm", "vllm")
    import vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe as experts

    if not hasattr(experts, "matmul_ogs"):
        raise LeftOut("vLLM found no triton_kernels that it can use")
    from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig
    from vllm.model_executor.layers.quantization.utils.mxfp4_utils import _swizzle_mxfp4

    codes = torch.empty((gemm.experts, gemm.n, gemm.k // 2), dtype=torch.uint8, device=options.device).random_(0, 256)
    scales = torch.empty((gemm.experts, gemm.n, gemm.k // 32), dtype=torch.uint8, device=options.device).random_(
        118, 123
    )
    weights, flex, scales = _swizzle_mxfp4(codes, scales)
    precision = PrecisionConfig(weight_scale=scales, flex_ctx=FlexCtx(rhs_data=flex))
    del codes

    def calls(rows: Rows) -> Iterator[Call]:
        routing, gather, _ = experts.make_routing_data(rows.ids, rows.weights, gemm.experts)
        x = rows.x if gemm.gathered else rows.x_sorted
        out = torch.empty((1, rows.total, gemm.n), dtype=x.dtype, device=options.device)

        run = partial(
            experts.matmul_ogs, x, weights, None, routing, gather_indx=gather if gemm.gathered else None,
            precision_config=precision, y=out,
        )  # fmt: skip
        yield Call("triton", "peer", run, _active_bytes(rows, fmt), out, version=release)

    return calls


def deepgemm(gemm: Gemm, fmt: str, options: Options) -> Calls:
    """DeepGEMM's grouped FP8 on weights of 8 bits in blocks of 128 x 128, rows of each expert padded as it wants."""
    if fmt != "mxfp4_fp8":
        raise LeftOut("DeepGEMM has 8-bit weights and FP8 activations")
    if gemm.n % 128 or gemm.k % 128:
        raise LeftOut(f"DeepGEMM's blocks of 128 do not fit N {gemm.n}, K {gemm.k}")
    try:
        module, release = installed("deep-gemm", "deep_gemm")
    except LeftOut:
        module, release = installed("vllm", "vllm.third_party.deep_gemm")
        release = f"vllm {release}"
    weights = torch.empty((gemm.experts, gemm.n, gemm.k), dtype=torch.uint8, device=options.device).random_(0x20, 0x40)
    weights = weights.view(torch.float8_e4m3fn)
    weight_scales = torch.full((gemm.experts, gemm.n // 128, gemm.k // 128), 2.0**-6, device=options.device)
    height = module.get_mk_alignment_for_contiguous_layout()

    def calls(rows: Rows) -> Iterator[Call]:
        values, scales = rows.x_fp8_sorted
        slots, experts, _ = rows.aligned(height)
        valid = slots < rows.total
        x = torch.zeros((len(slots), gemm.k), dtype=torch.uint8, device=options.device)
        x[valid] = values.view(torch.uint8)
        x_scales = torch.ones((len(slots), scales.shape[1]), device=options.device, dtype=torch.float32)
        x_scales[valid] = scales
        x, x_scales = x.view(torch.float8_e4m3fn), module.get_mn_major_tma_aligned_tensor(x_scales)
        row_experts = experts.repeat_interleave(height)
        out = torch.empty((len(slots), gemm.n), dtype=torch.bfloat16, device=options.device)

        run = partial(
            module.m_grouped_fp8_gemm_nt_contiguous, (x, x_scales), (weights, weight_scales), out, row_experts,
            disable_ue8m0_cast=True,
        )  # fmt: skip
        read = rows.active * gemm.n * gemm.k
        yield Call("deepgemm-8bit", "roof", run, read, out, valid, tile=str(height), version=release)

    return calls


def cublas(gemm: Gemm, fmt: str, options: Options) -> Calls:
    """Dense cuBLAS of as many rows with one weight [N, K]: bf16 or, for FP8 activations, e4m3 with one scale."""
    device = options.device
    weight = torch.randn((gemm.n, gemm.k), device=device, dtype=torch.float32)
    is_fp8 = WEIGHT_FORMATS[fmt].path == "w4a8"
    weight = weight.to(torch.float8_e4m3fn if is_fp8 else torch.bfloat16)
    one = torch.ones((), device=device, dtype=torch.float32)

    def calls(rows: Rows) -> Iterator[Call]:
        if is_fp8:
            x, scales = rows.x_fp8_sorted[0], {"scale_a": one, "scale_b": one}
            run = partial(torch._scaled_mm, x, weight.T, **scales, out_dtype=torch.bfloat16, use_fast_accum=True)
        else:
            run = partial(torch.matmul, rows.x_sorted, weight.T)
        label = "cublas-fp8" if is_fp8 else "cublas-bf16"
        yield Call(label, "roof", run, weight.nbytes, version=torch.version.cuda or "")

    return calls


CONTESTANTS: dict[str, Callable[[Gemm, str, Options], Calls]] = {
    "ours": ours,
    "humming": humming,
    "marlin": marlin,
    "triton": triton,
    "deepgemm": deepgemm,
    "cublas": cublas,
}
COMPILING = ("humming", "marlin", "triton", "deepgemm")  # compile kernels when they are first called
