# SPDX-License-Identifier: Apache-2.0
"""Packs FP4 projections into the kernels' layout and back.

The layout (chunks of 64 rows x 128 K, gated row order, code words, group scales, row scales) is defined in
docs/kernel-notes.md, section 2. Everything here is vectorised torch and runs on whatever device the tensors are on.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vllm_humming.moe.codes import BLOCK_ROWS, CHUNK_K, CODE_BYTES, code_values, code_words
from vllm_humming.moe.findings import NONE, REFUSED, Field, Findings, Names, first_place, refuse, rounding_of
from vllm_humming.moe.fp8 import Rounding
from vllm_humming.moe.scales import Window, window_of
from vllm_humming.moe.weight_formats import MXFP4, WeightFormat, factor_table


@dataclass(frozen=True, eq=False)
class PackedProjection:
    """One projection of every local expert in the kernels' layout.

    packed: uint8 [E, rows / 64, K / 128, weight_format.chunk_bytes]. row_scale: fp32 [E, rows]. bias: fp32 [E, rows] or
    None. rows and K are the padded sizes; row_scale and bias are in packed row order.
    """

    packed: Tensor
    row_scale: Tensor
    bias: Tensor | None
    weight_format: WeightFormat

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """(packed, row_scale, bias), as the op takes them."""
        return self.packed, self.row_scale, self.bias


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def padded_k(k: int) -> int:
    """The K of the packed layout for k input features."""
    return round_up(k, CHUNK_K)


def padded_rows(rows: int, gated: bool, pad_to: int | None = None) -> int:
    """The rows of the packed layout for `rows` output features.

    Gated: rows counts gate and up, and each half is padded to a multiple of pad_to (default 128). Otherwise the rows
    are padded to a multiple of pad_to (default 64; a non-gated w13 wants 128, because its rows are the K of w2).
    Raises ValueError when a gated projection has an odd number of rows or pad_to does not fill whole blocks.
    """
    unit = BLOCK_ROWS // 2 if gated else BLOCK_ROWS
    pad_to = pad_to if pad_to is not None else (CHUNK_K if gated else BLOCK_ROWS)
    if pad_to % unit:
        raise ValueError(f"pad_to must be a multiple of {unit}, found {pad_to}")
    if not gated:
        return round_up(rows, pad_to)
    if rows % 2:
        raise ValueError(f"a gated projection needs as many gate as up rows, found {rows} rows in all")
    return 2 * round_up(rows // 2, pad_to)


def allocate(
    num_experts: int,
    out_features: int,
    in_features: int,
    *,
    gated: bool,
    has_bias: bool,
    device: torch.device | str,
    pad_rows_to: int | None = None,
    weight_format: WeightFormat = MXFP4,
) -> PackedProjection:
    """A projection of zero weights for [E, out_features, in_features]: zero codes, legal scales, row scale 1, bias 0.

    Legal under both activation dtypes. pad_rows_to: see padded_rows.
    """
    rows = padded_rows(out_features, gated, pad_rows_to)
    packed = torch.zeros(
        (num_experts, rows // BLOCK_ROWS, padded_k(in_features) // CHUNK_K, weight_format.chunk_bytes),
        dtype=torch.uint8,
        device=device,
    )
    packed[..., CODE_BYTES:] = weight_format.zero_group
    row_scale = torch.ones((num_experts, rows), dtype=torch.float32, device=device)
    bias = torch.zeros((num_experts, rows), dtype=torch.float32, device=device) if has_bias else None
    return PackedProjection(packed, row_scale, bias, weight_format)


def fitting_k(dst: PackedProjection, k: int) -> int:
    """The K of weights that leave to padding at most a part of one chunk: k, or all of dst's where that is larger."""
    whole = dst.packed.shape[2] * CHUNK_K
    return k if padded_k(k) == whole else whole


def pack_expert(
    dst: PackedProjection,
    expert: int,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    *,
    global_scale: Tensor | None = None,
    gated: bool,
    gate_up: Literal["packed", "interleaved"] = "packed",
    dtype: torch.dtype,
    layer: str,
    tensor: str = "weight",
    where: str | None = None,
) -> Rounding:
    """Packs one expert's projection into dst, in place, padding included; returns what that took from its weights.

    codes: uint8 or int8 [N, K/2], even k in the low nibble. scales: [N, K/group], in one of the format's scale_dtypes.
    bias: [N] or None, as dst has it. global_scale: fp32, one value or [N] in the rows' order, for formats that have
    one. N and K may be smaller than dst's padded sizes.
    gate_up: row order of a gated checkpoint tensor, "packed" [gate; up] or "interleaved" (gate0, up0, gate1, ...).
    dtype: the activations' dtype, bfloat16 or float16. Errors start with where; None: layer, expert and tensor.
    Raises ValueError, and leaves dst as it was, for a wrong shape or dtype, scales that are NaN, negative or no value
    of the format, a global scale that is not positive and finite, NaN or infinity in a bias, and scales that the dtype
    does not hold exactly. Waits for the device; `pack` does not.
    """
    where = where or f"{layer}: expert {expert}: {tensor}"
    window = window_of(dtype)
    k = dst.packed.shape[2] * CHUNK_K
    codes, raw, factor = _checked_inputs(where, codes, scales, bias, global_scale, dst, k, gated)
    findings = Findings(1, dst.packed.device)
    interleaved = gate_up == "interleaved"
    pack(dst, expert, codes, raw, bias, factor, findings.records[0], gated=gated, interleaved=interleaved, dtype=dtype)
    (found,) = findings.read()
    refuse(found, Names(where, f"{where} bias", (where,), codes.shape[0]), dst.weight_format, window)
    return rounding_of(found, raw.numel())


def pack(
    dst: PackedProjection,
    expert: int,
    codes: Tensor,
    raw: Tensor,
    bias: Tensor | None,
    global_scale: Tensor | None,
    record: Tensor,
    *,
    gated: bool,
    interleaved: bool,
    dtype: torch.dtype,
) -> None:
    """pack_expert for tensors whose shapes are known to fit, without waiting for the device: what it finds in the
    weights it leaves in record, int64 [fields] (moe.findings), and it packs nothing that is to be refused.

    codes uint8 [N, K/2] and raw scale bytes uint8 [N, groups], contiguous; bias [N]; global_scale fp32 [1] or [N].
    """
    fmt = dst.weight_format
    bias = None if bias is None else bias.detach().float().contiguous()
    # The rows' scales, before the padded ones come between: what one kernel hands to the next.
    row_scale = torch.empty(codes.shape[0], dtype=torch.float32, device=codes.device)
    target = dst.packed[expert], dst.row_scale[expert], None if dst.bias is None else dst.bias[expert]
    if _compiled(codes.device):
        if codes.data_ptr() % 8:  # the kernels read words
            codes = codes.clone()
        fp16 = int(dtype == torch.float16)
        torch.ops.vllm_humming.pack_rows(
            codes, raw, global_scale, bias, row_scale, *target, record,
            fmt.code, fp16, gated, interleaved, fmt.zero_group,
        )  # fmt: skip
    else:
        pack_rows(
            codes,
            raw,
            global_scale,
            bias,
            row_scale,
            *target,
            record,
            weight_format=fmt,
            window=window_of(dtype),
            gated=gated,
            interleaved=interleaved,
        )


def _compiled(device: torch.device) -> bool:
    """Whether the compiled pack_rows, two launches, runs there."""
    from vllm_humming import ops  # which imports this module

    return device.type == "cuda" and ops.kernels_loaded()


def pack_rows(
    codes: Tensor,
    raw: Tensor,
    global_scale: Tensor | None,
    bias: Tensor | None,
    row_scale: Tensor,
    packed: Tensor,
    packed_row_scale: Tensor,
    packed_bias: Tensor | None,
    record: Tensor,
    *,
    weight_format: WeightFormat,
    window: Window,
    gated: bool,
    interleaved: bool,
) -> None:
    """The operator pack_rows in torch, its definition: one expert's checkpoint rows into its places in the layout.

    codes uint8 [N, K/2], raw uint8 [N, groups], global_scale fp32 [1] or [N], bias fp32 [N], rows in the checkpoint's
    order; packed uint8 [rows/64, K/128, chunk bytes], packed_row_scale and packed_bias fp32 [rows]; record int64
    [fields], to which this adds. row_scale fp32 [N] is overwritten. Where the record refuses something, the packed
    tensors stay as they are.
    """
    fmt, n = weight_format, codes.shape[0]
    factor = None if global_scale is None else global_scale.reshape(-1).expand(n)
    groups = fmt.pack_groups(codes.view(n, -1, fmt.group_k // 2), raw, factor, window)
    row_scale.copy_(groups.row_scale)
    place_in_row = torch.arange(raw.shape[1], device=raw.device) << 8
    found = {Field.SCALE: first_place(fmt.illegal_scales(raw), place_in_row + raw.long())}
    if bias is not None:
        found[Field.BIAS] = first_place(~bias.isfinite(), 0)
    if groups.refused is not None and groups.detail is not None:
        found[Field.GLOBAL if fmt.has_global else Field.WINDOW] = first_place(groups.refused, groups.detail)
    for field, place_of in found.items():
        record[field] = torch.minimum(record[field], place_of)
    if groups.rounding is not None:
        record[Field.ROUNDED] += groups.rounding.groups
        worst = torch.tensor(groups.rounding.worst, dtype=torch.float64).view(torch.int64)  # ordered as the numbers are
        record[Field.WORST] = record[Field.WORST].clamp(min=int(worst))
    if bool((record[: len(REFUSED)] == NONE).all()):
        place(
            groups.codes.view_as(codes),
            groups.scales,
            groups.row_scale,
            bias,
            packed,
            packed_row_scale,
            packed_bias,
            weight_format=fmt,
            window=window,
            gated=gated,
            interleaved=interleaved,
        )


def place(
    codes: Tensor,
    scales: Tensor,
    row_scale: Tensor,
    bias: Tensor | None,
    packed: Tensor,
    packed_row_scale: Tensor,
    packed_bias: Tensor | None,
    *,
    weight_format: WeightFormat,
    window: Window,
    gated: bool,
    interleaved: bool,
) -> None:
    """Writes one expert's weights, as pack_groups makes them, to their places in the layout, and the padding.

    codes uint8 [N, K/2], scales uint8 [N, groups], row_scale and bias fp32 [N], rows in the checkpoint's order; packed
    uint8 [rows/64, K/128, chunk bytes], packed_row_scale and packed_bias fp32 [rows].
    """
    fmt, (blocks, chunks) = weight_format, packed.shape[:2]
    rows, k = blocks * BLOCK_ROWS, chunks * CHUNK_K

    def spread(t: Tensor, columns: int, fill: float) -> Tensor:
        return _to_packed_rows(t, rows, columns, gated=gated, interleaved=interleaved, fill=fill)

    words = code_words(spread(codes, k // 2, 0), fmt.code_layout(window))
    # [block, w, half, g, chunk, group] -> [block, chunk, w, g, half, group]
    group_bytes = spread(scales, k // fmt.group_k, fmt.zero_group)
    group_bytes = group_bytes.view(blocks, 4, 2, 8, chunks, fmt.chunk_groups)
    group_bytes = group_bytes.permute(0, 4, 1, 3, 2, 5).reshape(blocks, chunks, fmt.scale_bytes)

    packed.view(torch.int32)[..., : CODE_BYTES // 4].copy_(words)
    packed[..., CODE_BYTES:].copy_(group_bytes)
    packed_row_scale.copy_(spread(row_scale[:, None], 1, 1.0)[:, 0])
    if packed_bias is not None and bias is not None:
        packed_bias.copy_(spread(bias[:, None], 1, 0.0)[:, 0])


def unpack_expert(
    p: PackedProjection,
    expert: int,
    *,
    dtype: torch.dtype,
    k: int,
    out_features: int,
    gated: bool,
    out_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor | None]:
    """One expert's weights [out_features, k] and bias [out_features] or None, in out_dtype (float32 or float64).

    dtype is the one the expert was packed for. Gated rows come back as [gate; up]. Weights are exact, except that
    float32 overflows to infinity from 2^128 (scale bytes 253 and 254); float64 holds every value.
    """
    weight, row_scale, bias = unpack_unscaled(
        p, expert, dtype=dtype, k=k, out_features=out_features, gated=gated, out_dtype=out_dtype
    )
    return weight.mul_(row_scale[:, None]), bias


def unpack_unscaled(
    p: PackedProjection,
    expert: int,
    *,
    dtype: torch.dtype,
    k: int,
    out_features: int,
    gated: bool,
    out_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What the kernels multiply: (weights without the row scale [out_features, k], row scale [out_features], bias).

    Rows in checkpoint order as in unpack_expert. The unscaled weights are exact in out_dtype and in what the kernels
    decode to: dtype or, in formats for FP8 activations, e4m3.
    """
    fmt, window = p.weight_format, window_of(dtype)
    source = p.packed[expert]
    blocks, chunks = source.shape[:2]
    rows, device = blocks * BLOCK_ROWS, source.device
    words = source.view(torch.int32)[..., : CODE_BYTES // 4]
    weight = code_values(words, fmt.code_layout(window), out_dtype).view(-1, fmt.group_k)
    # [block, chunk, w, g, half, group] -> [block, w, half, g, chunk, group]
    packed_scales = source[..., CODE_BYTES:].reshape(blocks, chunks, 4, 8, 2, fmt.chunk_groups)
    packed_scales = packed_scales.permute(0, 2, 4, 3, 1, 5).reshape(-1).to(torch.int32)
    weight.mul_(factor_table(device, out_dtype, fmt, window).index_select(0, packed_scales)[:, None])
    weight = weight.view(rows, chunks * CHUNK_K)

    def restore(t: Tensor) -> Tensor:
        return _from_packed_rows(t, out_features, gated)

    bias = None if p.bias is None else restore(p.bias[expert]).to(out_dtype)
    return restore(weight)[:, :k], restore(p.row_scale[expert]).to(out_dtype), bias


def _checked_inputs(
    where: str,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    global_scale: Tensor | None,
    dst: PackedProjection,
    k: int,
    gated: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes as contiguous uint8, raw scale bytes and the global scale [1] or [N], shapes checked against dst."""
    fmt, group, rows = dst.weight_format, dst.weight_format.group_k, dst.row_scale.shape[1]
    if codes.dtype not in (torch.uint8, torch.int8):
        raise ValueError(f"{where} codes must be uint8 or int8, found {codes.dtype}")
    if codes.dim() != 2 or codes.shape[1] % (group // 2):
        raise ValueError(f"{where} codes must be [N, K/2] with K a multiple of {group}, found {tuple(codes.shape)}")
    n, in_features = codes.shape[0], codes.shape[1] * 2
    if padded_k(in_features) != k or not 0 < n <= rows or (gated and n % 2):
        even = "an even number of rows" if gated else "rows"
        raise ValueError(
            f"{where} codes must have {even}, 1 to {rows}, and K in {k - CHUNK_K + group}..{k}, "
            f"found N = {n}, K = {in_features}"
        )
    if tuple(scales.shape) != (n, in_features // group):
        raise ValueError(f"{where} scales must be {(n, in_features // group)}, found {tuple(scales.shape)}")
    if (bias is None) != (dst.bias is None):
        raise ValueError(f"{where} bias is {'missing' if bias is None else 'not expected by this layer'}")
    if bias is not None and tuple(bias.shape) != (n,):
        raise ValueError(f"{where} bias must be {(n,)}, found {tuple(bias.shape)}")
    if (global_scale is not None) != fmt.has_global:
        raise ValueError(f"{where} global scale is {'missing' if fmt.has_global else f'nothing that {fmt.label} has'}")
    if global_scale is not None:
        if global_scale.dtype != torch.float32 or (global_scale.numel() != 1 and tuple(global_scale.shape) != (n,)):
            raise ValueError(
                f"{where} global scale must be one float32 or {(n,)}, "
                f"found {global_scale.dtype} {tuple(global_scale.shape)}"
            )
        global_scale = global_scale.detach().reshape(-1).contiguous()
    return (
        codes.detach().contiguous().view(torch.uint8),
        fmt.scale_bytes_of(where, scales.detach().contiguous()),
        global_scale,
    )


def _to_packed_rows(t: Tensor, rows: int, columns: int, *, gated: bool, interleaved: bool, fill: float) -> Tensor:
    """[N, c] in checkpoint row order -> [rows, columns] in packed row order, padded with fill."""
    n, c = t.shape
    if not gated:
        return t if (n, c) == (rows, columns) else _padded(t, (rows, columns), fill)
    halves = t.view(n // 2, 2, c).transpose(0, 1) if interleaved else t.view(2, n // 2, c)
    if (n, c) != (rows, columns):
        halves = _padded(halves, (2, rows // 2, columns), fill)
    return halves.reshape(2, rows // 16, 8, columns).transpose(0, 1).reshape(rows, columns)


def _padded(t: Tensor, shape: tuple[int, ...], fill: float) -> Tensor:
    out = torch.full(shape, fill, dtype=t.dtype, device=t.device)
    out[tuple(slice(size) for size in t.shape)] = t
    return out


def _from_packed_rows(t: Tensor, out_features: int, gated: bool) -> Tensor:
    """[rows, ...] in packed row order -> [out_features, ...] in checkpoint order ([gate; up] when gated)."""
    if not gated:
        return t[:out_features]
    halves = t.view(t.shape[0] // 16, 2, 8, -1).transpose(0, 1).reshape(2, t.shape[0] // 2, -1)
    return halves[:, : out_features // 2].reshape(out_features, *t.shape[1:])
