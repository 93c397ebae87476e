# SPDX-License-Identifier: Apache-2.0
"""The operators on CPU tensors: their arguments checked, then the reference. ops.py has the contracts."""

import torch
from torch import Tensor

from vllm_humming.moe import packing, reference
from vllm_humming.moe.codes import CHUNK_K
from vllm_humming.moe.findings import Field
from vllm_humming.moe.layouts import GemmLayout
from vllm_humming.moe.packing import PackedProjection
from vllm_humming.moe.scales import window_of
from vllm_humming.moe.weight_formats import BY_CODE, WeightFormat

_DTYPES = (torch.bfloat16, torch.float16)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_projection(
    name: str, weight_format: WeightFormat, packed: Tensor, row_scale: Tensor, bias: Tensor | None
) -> PackedProjection:
    size = weight_format.chunk_bytes
    _check(
        packed.dtype == torch.uint8 and packed.dim() == 4 and packed.shape[3] == size,
        f"{name} must be uint8 [E, rows/64, K/128, {size}] ({weight_format.label}), "
        f"found {packed.dtype} {tuple(packed.shape)}",
    )
    _check(packed.numel() > 0 and packed.is_contiguous(), f"{name} must be contiguous and hold something")
    rows = (packed.shape[0], packed.shape[1] * 64)
    for label, t in (("row_scale", row_scale), ("bias", bias)):
        if t is not None:
            _check(
                t.dtype == torch.float32 and tuple(t.shape) == rows and t.is_contiguous(),
                f"{name} {label} must be float32 {rows} and contiguous, found {t.dtype} {tuple(t.shape)}",
            )
    return PackedProjection(packed, row_scale, bias, weight_format)


def _check_format(weight_format: int) -> WeightFormat:
    known = {code: fmt.name for code, fmt in BY_CODE.items()}
    _check(weight_format in known, f"weight_format must be one of {known}, found {weight_format}")
    return BY_CODE[weight_format]


def _check_layer(w13: Tensor, w2: Tensor, activation: int, hidden: int) -> None:
    _check(activation in tuple(reference.Activation), f"activation must be 0, 1 or 2, found {activation}")
    intermediate = w2.shape[2] * CHUNK_K
    rows = intermediate * (2 if reference.Activation(activation).gated else 1)
    _check(
        w13.shape[0] == w2.shape[0] and w13.shape[1] * 64 == rows,
        f"w13 must have {rows} rows for {w2.shape[0]} experts (w2 has K = {intermediate}), found {tuple(w13.shape)}",
    )
    _check(hidden % 8 == 0, f"the hidden size must be a multiple of 8, found {hidden}")
    _check(
        w13.shape[2] == -(-hidden // CHUNK_K) and w2.shape[1] == -(-hidden // 64),
        f"x has H = {hidden}, which does not belong to w13 {tuple(w13.shape)} and w2 {tuple(w2.shape)}",
    )


def _check_tokens(x: Tensor, x_scale: Tensor | None, out: Tensor, fmt: WeightFormat) -> None:
    """dtypes of x and out, the scales of e4m3 tokens, and what the kernels ask of memory."""
    _check(out.dtype in _DTYPES, f"out must be bfloat16 or float16, found {out.dtype}")
    if fmt.path == "a16":
        _check(
            x.dtype == out.dtype and x_scale is None,
            f"{fmt.label} takes x of out's dtype, {out.dtype}, and no x_scale, found {x.dtype}"
            + ("" if x_scale is None else " and an x_scale"),
        )
    else:
        _check(
            x.dtype in _DTYPES or x.dtype == torch.float8_e4m3fn,
            f"{fmt.label} takes x as bfloat16, float16 or float8_e4m3fn, found {x.dtype}",
        )
        wanted = x.dtype == torch.float8_e4m3fn
        _check(wanted == (x_scale is not None), f"x_scale must be {'given' if wanted else 'None'} for x of {x.dtype}")
    if x_scale is not None:
        shape = (*x.shape[:-1], -(-x.shape[-1] // CHUNK_K))
        _check(
            x_scale.dtype == torch.float32 and x_scale.shape == shape,
            f"x_scale must be float32 {shape}, found {x_scale.dtype} {tuple(x_scale.shape)}",
        )
    _check(x.is_contiguous() and out.is_contiguous(), "x and out must be contiguous")
    k, n = x.shape[-1], out.shape[-1]
    _check(k % 8 == 0 and n % 8 == 0, f"the last sizes of x and out must be multiples of 8, found {k} and {n}")


def _check_int32(name: str, t: Tensor, *shape: int) -> None:
    _check(
        t.dtype == torch.int32 and t.shape == shape and t.is_contiguous(),
        f"{name} must be contiguous int32 {shape}, found {t.dtype} {tuple(t.shape)}",
    )


def moe(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    w13: Tensor,
    w13_row_scale: Tensor,
    w13_bias: Tensor | None,
    w2: Tensor,
    w2_row_scale: Tensor,
    w2_bias: Tensor | None,
    workspace: Tensor,
    out: Tensor,
    weight_format: int,
    activation: int,
    alpha: float,
    beta: float,
    limit: float,
    router_weight_on_input: bool,
    tile1: int,
    tile2: int,
) -> None:
    fmt = _check_format(weight_format)
    first = _check_projection("w13", fmt, w13, w13_row_scale, w13_bias)
    second = _check_projection("w2", fmt, w2, w2_row_scale, w2_bias)
    _check(
        x.dtype in _DTYPES and x.dim() == 2 and out.dtype == x.dtype and out.shape == x.shape,
        f"x and out must be [M, H] of one dtype, bfloat16 or float16, found {x.dtype} {tuple(x.shape)} and "
        f"{out.dtype} {tuple(out.shape)}",
    )
    _check(x.is_contiguous() and out.is_contiguous(), "x and out must be contiguous")
    _check_layer(w13, w2, activation, x.shape[1])
    _check(
        topk_ids.shape == topk_weights.shape and topk_ids.dim() == 2 and topk_ids.shape[0] == x.shape[0],
        f"topk_ids and topk_weights must be [{x.shape[0]}, k], found {tuple(topk_ids.shape)} and "
        f"{tuple(topk_weights.shape)}",
    )
    _check(topk_ids.shape[1] > 0, "top_k must be at least 1")
    _check_int32("topk_ids", topk_ids, *topk_ids.shape)
    _check(
        topk_weights.dtype == torch.float32 and topk_weights.is_contiguous(),
        f"topk_weights must be contiguous float32, found {topk_weights.dtype}",
    )
    if expert_map is not None:
        _check_int32("expert_map", expert_map, expert_map.numel())
    reference.moe(
        x,
        topk_weights,
        topk_ids,
        expert_map,
        first,
        second,
        out,
        activation=activation,
        alpha=alpha,
        beta=beta,
        limit=limit,
        router_weight_on_input=router_weight_on_input,
    )


def moe_batched(
    x: Tensor,
    x_scale: Tensor | None,
    counts: Tensor,
    w13: Tensor,
    w13_row_scale: Tensor,
    w13_bias: Tensor | None,
    w2: Tensor,
    w2_row_scale: Tensor,
    w2_bias: Tensor | None,
    workspace: Tensor,
    out: Tensor,
    weight_format: int,
    activation: int,
    alpha: float,
    beta: float,
    limit: float,
    tile1: int,
    tile2: int,
) -> None:
    fmt = _check_format(weight_format)
    first = _check_projection("w13", fmt, w13, w13_row_scale, w13_bias)
    second = _check_projection("w2", fmt, w2, w2_row_scale, w2_bias)
    _check(
        x.dim() == 3 and x.shape == out.shape and x.shape[0] == w13.shape[0],
        f"x and out must be [{w13.shape[0]}, max, H], found {tuple(x.shape)} and {tuple(out.shape)}",
    )
    _check_tokens(x, x_scale, out, fmt)
    _check_layer(w13, w2, activation, x.shape[2])
    _check_int32("counts", counts, x.shape[0])
    reference.moe_batched(
        x, x_scale, counts, first, second, out, activation=activation, alpha=alpha, beta=beta, limit=limit
    )


def grouped_gemm(
    x: Tensor,
    x_scale: Tensor | None,
    packed: Tensor,
    row_scale: Tensor,
    bias: Tensor | None,
    groups: Tensor | None,
    rows: Tensor | None,
    workspace: Tensor,
    out: Tensor,
    layout: int,
    weight_format: int,
    tile: int,
) -> None:
    fmt = _check_format(weight_format)
    weights = _check_projection("packed", fmt, packed, row_scale, bias)
    experts = packed.shape[0]
    _check(
        layout in tuple(GemmLayout), f"layout must be one of {[f'{v}: {v.name}' for v in GemmLayout]}, found {layout}"
    )
    kind = GemmLayout(layout)
    if kind is GemmLayout.MASKED:
        _check(
            x.dim() == 3 and out.dim() == 3 and x.shape[:2] == out.shape[:2] and x.shape[0] == experts,
            f"x must be [{experts}, max, K] and out [{experts}, max, N] in the layout MASKED, "
            f"found {tuple(x.shape)} and {tuple(out.shape)}",
        )
    else:
        _check(
            x.dim() == 2 and out.dim() == 2,
            f"x and out must have two dimensions in the layout {kind.name}, found {tuple(x.shape)} and "
            f"{tuple(out.shape)}",
        )
    if kind is GemmLayout.INDEXED:
        _check(rows is not None, "the layout INDEXED needs rows")
        assert rows is not None
        _check_int32("rows", rows, out.shape[0])
    else:
        _check(rows is None, f"rows belong to the layout INDEXED, not to {kind.name}")
        _check(x.shape[0] == out.shape[0], f"x has {x.shape[0]} rows and out {out.shape[0]}")
    if groups is None:
        _check(
            kind is GemmLayout.CONTIGUOUS and experts == 1,
            "groups may be None in the layout CONTIGUOUS with one expert only, "
            f"found {kind.name} and {experts} experts",
        )
    else:
        _check_int32("groups", groups, experts if kind is GemmLayout.MASKED else experts + 1)
    _check_tokens(x, x_scale, out, fmt)
    _check_gemm_sizes(packed, x.shape[-1], out.shape[-1])
    reference.grouped_gemm(x, x_scale, weights, groups, rows, out, kind)


def _check_gemm_sizes(packed: Tensor, k: int, n: int) -> None:
    most_n, most_k = packed.shape[1] * 64, packed.shape[2] * CHUNK_K
    # FP8 tokens need a scale for each 128 of the packed K, and tiles that copy rows whole fill up only within the last.
    least_k = most_k - CHUNK_K + 1
    _check(
        least_k <= k <= most_k and 0 < n <= most_n,
        f"x has K = {k} and out N = {n}, which do not fit packed {tuple(packed.shape)}: "
        f"K must be in {least_k}..{most_k}, N in 1..{most_n}",
    )


def pack_rows(
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor | None,
    bias: Tensor | None,
    row_scale: Tensor,
    packed: Tensor,
    packed_row_scale: Tensor,
    packed_bias: Tensor | None,
    record: Tensor,
    weight_format: int,
    dtype: int,
    gated: bool,
    interleaved: bool,
    zero_group: int,
) -> None:
    fmt = _check_format(weight_format)
    _check(dtype in (0, 1), f"dtype must be 0 (bfloat16) or 1 (float16), found {dtype}")
    _check(zero_group == fmt.zero_group, f"zero_group of {fmt.label} is {fmt.zero_group}, found {zero_group}")
    _check((bias is None) == (packed_bias is None), "bias and packed_bias belong together")
    _check(
        (global_scale is not None) == fmt.has_global,
        f"global_scale is {'missing' if fmt.has_global else f'nothing that {fmt.label} has'}",
    )
    target = (packed[None], packed_row_scale[None], None if packed_bias is None else packed_bias[None])
    _check_projection("packed", fmt, *target)
    n, k = codes.shape[0], codes.shape[1] * 2
    rows, whole = packed_row_scale.shape[0], packed.shape[1] * CHUNK_K
    _check(
        n <= rows and k <= whole and k % fmt.group_k == 0 and not (gated and n % 2),
        f"codes {tuple(codes.shape)} do not fit packed weights {tuple(packed.shape)}",
    )
    _check(
        record.dtype == torch.int64 and tuple(record.shape) == (len(Field),),
        f"record must be int64 ({len(Field)},), found {record.dtype} {tuple(record.shape)}",
    )
    packing.pack_rows(
        codes,
        scales,
        global_scale,
        bias,
        row_scale,
        packed,
        packed_row_scale,
        packed_bias,
        record,
        weight_format=fmt,
        window=window_of(_DTYPES[dtype]),
        gated=gated,
        interleaved=interleaved,
    )
