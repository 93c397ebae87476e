# SPDX-License-Identifier: Apache-2.0
"""Packs MXFP4 projections into the kernels' layout and back.

The layout (chunks of 64 rows x 128 K, gated row order, code words, group scales, row scales) is defined in
docs/kernel-notes.md, section 2. Everything here is vectorised torch and runs on whatever device the tensors are on.
"""

import math
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from vllm_humming.moe.scales import ZERO_GROUP_BYTE, Window, e8m0_bytes, window_of, window_scales

BLOCK_ROWS = 64
CHUNK_K = 128
GROUP_K = 32
CODE_BYTES = BLOCK_ROWS * CHUNK_K // 2
SCALE_BYTES = BLOCK_ROWS * CHUNK_K // GROUP_K
CHUNK_BYTES = CODE_BYTES + SCALE_BYTES

# Magnitudes of the sixteen e2m1 codes, index = code (OCP MX v1.0, table 5); bit 3 is the sign.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class PackedProjection(NamedTuple):
    """One projection of every local expert in the kernels' layout.

    packed: uint8 [E, rows / 64, K / 128, 4352]. row_scale: fp32 [E, rows]. bias: fp32 [E, rows] or None.
    rows and K are the padded sizes; row_scale and bias are in packed row order.
    """

    packed: Tensor
    row_scale: Tensor
    bias: Tensor | None


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
) -> PackedProjection:
    """A projection of zero weights for [E, out_features, in_features]: zero codes, legal scales, row scale 1, bias 0.

    Legal under both activation dtypes. pad_rows_to: see padded_rows.
    """
    rows = padded_rows(out_features, gated, pad_rows_to)
    packed = torch.zeros(
        (num_experts, rows // BLOCK_ROWS, padded_k(in_features) // CHUNK_K, CHUNK_BYTES),
        dtype=torch.uint8,
        device=device,
    )
    packed[..., CODE_BYTES:] = ZERO_GROUP_BYTE
    row_scale = torch.ones((num_experts, rows), dtype=torch.float32, device=device)
    bias = torch.zeros((num_experts, rows), dtype=torch.float32, device=device) if has_bias else None
    return PackedProjection(packed, row_scale, bias)


def pack_expert(
    dst: PackedProjection,
    expert: int,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    *,
    gated: bool,
    gate_up: Literal["packed", "interleaved"] = "packed",
    dtype: torch.dtype,
    layer: str,
    tensor: str = "weight",
) -> None:
    """Packs one expert's MXFP4 projection into dst, in place, padding included.

    codes: uint8 or int8 [N, K/2], even k in the low nibble. scales: [N, K/32], uint8 (e8m0), float8_e8m0fnu or float32
    holding exact powers of two. bias: [N] or None, as dst has it. N and K may be smaller than dst's padded sizes.
    gate_up: row order of a gated checkpoint tensor, "packed" [gate; up] or "interleaved" (gate0, up0, gate1, ...).
    dtype: the activations' dtype, bfloat16 or float16. layer and tensor name the source in errors.
    Raises ValueError, and leaves dst as it was, for a wrong shape or dtype, an e8m0 NaN (255), a float scale that is no
    power of two, and a row whose scales do not fit the dtype's exact window.
    """
    where = f"{layer}: expert {expert}: {tensor}"
    window = window_of(dtype)
    blocks, chunks = dst.packed.shape[1:3]
    rows, k = blocks * BLOCK_ROWS, chunks * CHUNK_K
    codes, scales = _checked_inputs(where, codes, scales, bias, dst, rows, k, gated)

    live = (codes.view(codes.shape[0], -1, GROUP_K // 2) & 0x77).ne(0).any(-1)  # groups with a non-zero code
    group_bytes, exponent = window_scales(where, scales, live, window)

    def spread(t: Tensor, columns: int, fill: float) -> Tensor:
        return _to_packed_rows(t, rows, columns, gated=gated, interleaved=gate_up == "interleaved", fill=fill)

    words = _code_words(spread(codes, k // 2, 0), window)
    # [block, w, half, g, chunk, group] -> [block, chunk, w, g, half, group]
    group_bytes = spread(group_bytes, k // GROUP_K, ZERO_GROUP_BYTE).view(blocks, 4, 2, 8, chunks, 4)
    group_bytes = group_bytes.permute(0, 4, 1, 3, 2, 5).reshape(blocks, chunks, SCALE_BYTES)
    row_scale = _power_table(codes.device, torch.float32, 128).index_select(0, exponent + 128)

    target = dst.packed[expert]
    target.view(torch.int32)[..., : CODE_BYTES // 4].copy_(words)
    target[..., CODE_BYTES:].copy_(group_bytes)
    dst.row_scale[expert].copy_(spread(row_scale[:, None], 1, 1.0)[:, 0])
    if dst.bias is not None and bias is not None:
        dst.bias[expert].copy_(spread(bias.detach().float()[:, None], 1, 0.0)[:, 0])


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

    Rows in checkpoint order as in unpack_expert. The unscaled weights are exact in dtype and in out_dtype.
    """
    window = window_of(dtype)
    source = p.packed[expert]
    blocks, chunks = source.shape[:2]
    rows, device = blocks * BLOCK_ROWS, source.device
    words = source.view(torch.int32)[..., : CODE_BYTES // 4].reshape(blocks, chunks, 2, 4, 8, 4, 4, 1, 1, 1)
    magnitude, sign = _lane_shifts(device, window)
    values = (words >> magnitude).bitwise_and_(7)
    values |= (words >> sign).bitwise_and_(1) << 3
    # [block, chunk, half_k, w, g, q, step, k_high, half, lane]
    # -> [block, w, half, g, chunk, half_k, step, k_high, q, lane]
    values = values.permute(0, 3, 8, 4, 1, 2, 6, 7, 5, 9).reshape(rows * chunks * 4, GROUP_K)
    weight = _value_table(device, out_dtype).index_select(0, values.view(-1)).view(-1, GROUP_K)
    # [block, chunk, w, g, half, group] -> [block, w, half, g, chunk, group]
    factors = source[..., CODE_BYTES:].reshape(blocks, chunks, 4, 8, 2, 4).permute(0, 2, 4, 3, 1, 5).reshape(-1)
    powers = _power_table(device, out_dtype, window.offset)
    weight.mul_(powers.index_select(0, factors.to(torch.int32))[:, None])
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
    dst: PackedProjection,
    rows: int,
    k: int,
    gated: bool,
) -> tuple[Tensor, Tensor]:
    """Codes as contiguous uint8 and scales as contiguous uint8 e8m0, both checked against each other and dst."""
    if codes.dtype not in (torch.uint8, torch.int8):
        raise ValueError(f"{where} codes must be uint8 or int8, found {codes.dtype}")
    if codes.dim() != 2 or codes.shape[1] % (GROUP_K // 2):
        raise ValueError(f"{where} codes must be [N, K/2] with K a multiple of {GROUP_K}, found {tuple(codes.shape)}")
    n, in_features = codes.shape[0], codes.shape[1] * 2
    if padded_k(in_features) != k or n > rows or (gated and n % 2):
        even = "an even number of" if gated else "any"
        raise ValueError(
            f"{where} codes must have {even} rows up to {rows} and K in {k - CHUNK_K + GROUP_K}..{k}, "
            f"found N = {n}, K = {in_features}"
        )
    if tuple(scales.shape) != (n, in_features // GROUP_K):
        raise ValueError(f"{where} scales must be {(n, in_features // GROUP_K)}, found {tuple(scales.shape)}")
    if (bias is None) != (dst.bias is None):
        raise ValueError(f"{where} bias is {'missing' if bias is None else 'not expected by this layer'}")
    if bias is not None and tuple(bias.shape) != (n,):
        raise ValueError(f"{where} bias must be {(n,)}, found {tuple(bias.shape)}")
    return codes.detach().contiguous().view(torch.uint8), e8m0_bytes(where, scales.detach().contiguous())


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


def _code_words(codes: Tensor, window: Window) -> Tensor:
    """uint8 [rows, K/2] in packed row order -> int32 [rows / 64, K / 128, 1024]."""
    blocks, chunks = codes.shape[0] // BLOCK_ROWS, codes.shape[1] * 2 // CHUNK_K
    # [block, w, half, g, chunk, half_k, step, k_high, q] -> [k_high, half, block, chunk, half_k, w, g, q, step]
    fragments = codes.view(blocks, 4, 2, 8, chunks, 2, 4, 2, 4).permute(7, 2, 0, 4, 5, 1, 3, 8, 6).reshape(4, -1)
    words = None
    for fragment, table in zip(fragments, _word_table(codes.device, window), strict=True):
        part = table.index_select(0, fragment.to(torch.int32))
        words = part if words is None else words.bitwise_or_(part)
    assert words is not None
    return words.view(blocks, chunks, CODE_BYTES // 4)


@lru_cache(maxsize=32)
def _word_table(device: torch.device, window: Window) -> Tensor:
    """int32 [4, 256]: fragment and code byte (two codes) -> that fragment's bits of the word."""
    table = []
    for low, sign in zip(window.magnitude_bits, window.sign_bits, strict=True):
        lanes = [(code & 7) << low | (code >> 3) << sign for code in range(16)]
        words = [lanes[byte & 15] | lanes[byte >> 4] << 16 for byte in range(256)]
        table.append([word - (1 << 32) if word >> 31 else word for word in words])
    return torch.tensor(table, dtype=torch.int32, device=device)


@lru_cache(maxsize=32)
def _lane_shifts(device: torch.device, window: Window) -> tuple[Tensor, Tensor]:
    """int32 [k_high 2, half 2, lane 2] right shifts that bring magnitude and sign of a word's codes to bit 0."""
    lanes = torch.tensor([0, 16], dtype=torch.int32)
    magnitude = torch.tensor(window.magnitude_bits, dtype=torch.int32)[:, None] + lanes
    sign = torch.tensor(window.sign_bits, dtype=torch.int32)[:, None] + lanes
    return magnitude.view(2, 2, 2).to(device), sign.view(2, 2, 2).to(device)


@lru_cache(maxsize=32)
def _value_table(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(E2M1_VALUES, dtype=dtype, device=device)


@lru_cache(maxsize=64)
def _power_table(device: torch.device, dtype: torch.dtype, offset: int) -> Tensor:
    """2^(i - offset) for i in 0..255, exact (0 where it underflows; such bytes are never written)."""
    return torch.tensor([math.ldexp(1.0, i - offset) for i in range(256)], dtype=torch.float64).to(device, dtype)
