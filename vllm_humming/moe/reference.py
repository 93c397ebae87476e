# SPDX-License-Identifier: Apache-2.0
"""The operators in plain torch: the CPU path of the ops, and a float64 oracle of the layer for tests.

Rounding points are those of docs/kernel-notes.md, section 1: fp32 accumulation, `h` and the weighted slot outputs
rounded once to the activation dtype, the sum over top-k in fp32 and ascending, rounded once. On the FP8 path x and `h`
are quantised to e4m3 in blocks of 128 instead (`h` from fp32), and each block's sum is scaled before it is added.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from functools import partial

import torch
from torch import Tensor

from vllm_humming.moe import fp8
from vllm_humming.moe.codes import BLOCK_ROWS, CHUNK_K
from vllm_humming.moe.layouts import GemmLayout, expert_rows
from vllm_humming.moe.packing import PackedProjection, unpack_unscaled


class Activation(IntEnum):
    """The op's `activation` codes."""

    SWIGLU = 0  # g = min(gate, limit); u = clamp(up, -limit, limit); (u + beta) * g * sigmoid(alpha * g)
    GELU_TANH = 1  # gelu_tanh(gate) * up
    RELU2 = 2  # max(x, 0)^2, not gated

    @property
    def gated(self) -> bool:
        return self is not Activation.RELU2


def moe(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    w13: PackedProjection,
    w2: PackedProjection,
    out: Tensor,
    *,
    activation: int,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float = math.inf,
    router_weight_on_input: bool = False,
) -> None:
    """Writes the routed-experts layer of x [M, H] (bf16 or fp16) to out [M, H]; x is only read.

    topk_weights fp32 [M, k]; topk_ids int32 [M, k], global ids when expert_map (int32 [global experts]) is given. Ids
    that are negative, out of range or mapped to a negative expert contribute nothing. w13 and w2 are packed for
    x.dtype, in one weight format. Works on any device, one pass per active expert.
    """
    act = partial(activate, activation=Activation(activation), alpha=alpha, beta=beta, limit=limit)
    tokens, hidden = x.shape
    top_k = topk_ids.shape[1]
    y = torch.zeros((tokens * top_k, hidden), dtype=x.dtype, device=x.device)
    slot_weights = topk_weights.reshape(-1).float()
    for expert, slots in _slots_by_expert(topk_ids, expert_map, w13.packed.shape[0]):
        weights = slot_weights[slots][:, None]
        first = weights if router_weight_on_input else None
        slot_out = _expert(x[slots // top_k], None, expert, w13, w2, act, hidden, x.dtype, first)
        if not router_weight_on_input:
            slot_out.mul_(weights)
        y[slots] = slot_out.to(x.dtype)
    total = torch.zeros((tokens, hidden), dtype=torch.float32, device=x.device)
    for slot in y.view(tokens, top_k, hidden).unbind(1):
        total += slot
    out.copy_(total)


def moe_batched(
    x: Tensor,
    x_scale: Tensor | None,
    counts: Tensor,
    w13: PackedProjection,
    w2: PackedProjection,
    out: Tensor,
    *,
    activation: int,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float = math.inf,
) -> None:
    """Writes each expert's layer of its first counts[e] rows of x [E, max, H] to out [E, max, H]; other rows stay.

    x: out's dtype (bf16 or fp16); for the FP8 format any of the two, or e4m3 with x_scale fp32 [E, max, ceil(H / 128)].
    counts int32 [E]. No router weights, no sum over experts. Raises ValueError for counts outside 0..max.
    """
    act = partial(activate, activation=Activation(activation), alpha=alpha, beta=beta, limit=limit)
    experts, most, hidden = x.shape
    tokens, scales, result = _rows(x), None if x_scale is None else _rows(x_scale), out.view(-1, hidden)
    for expert, at in expert_rows(GemmLayout.MASKED, counts, experts, experts * most, most):
        scale = None if scales is None else scales[at]
        result[at] = _expert(tokens[at], scale, expert, w13, w2, act, hidden, out.dtype).to(out.dtype)


def grouped_gemm(
    x: Tensor,
    x_scale: Tensor | None,
    weights: PackedProjection,
    groups: Tensor | None,
    rows: Tensor | None,
    out: Tensor,
    layout: GemmLayout,
) -> None:
    """Writes x times each row's expert, plus bias, to out, rounded once; rows of no expert stay.

    Shapes: GemmLayout. x as in moe_batched. weights in natural row order, packed for out.dtype. Raises ValueError for
    groups that expert_rows refuses and rows outside x.
    """
    most = out.shape[1] if layout is GemmLayout.MASKED else 0
    tokens, scales, result = _rows(x), None if x_scale is None else _rows(x_scale), _rows(out)
    for expert, at in expert_rows(layout, groups, weights.packed.shape[0], result.shape[0], most):
        source: slice | Tensor = at
        if rows is not None:
            source = rows[at].long()
            if bool(((source < 0) | (source >= tokens.shape[0])).any()):
                raise ValueError(f"rows must be in 0..{tokens.shape[0] - 1}, found {rows[at].tolist()}")
        weight, row_scale, bias = unpack_unscaled(
            weights, expert, dtype=out.dtype, k=x.shape[-1], out_features=out.shape[-1], gated=False
        )
        scale = None if scales is None else scales[source]
        acc = _linear(tokens[source], weight, row_scale, weights, scale)
        result[at] = (acc if bias is None else acc.add_(bias)).to(out.dtype)


def oracle_moe(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    w13: Sequence[Tensor] | Tensor,
    b13: Sequence[Tensor] | Tensor | None,
    w2: Sequence[Tensor] | Tensor,
    b2: Sequence[Tensor] | Tensor | None,
    *,
    activation: int,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float = math.inf,
    router_weight_on_input: bool = False,
    fp8_activations: bool = False,
    second_input: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """The layer in float64 without intermediate rounding, from dense weights: float64 [M, H].

    w13[e] [2I, H] ([gate; up]) or [I, H] when not gated, w2[e] [H, I], b13[e] and b2[e] matching; indexed by expert, so
    a lazy sequence keeps memory low. Other arguments as in moe. fp8_activations: x and h are rounded as the FP8 path
    rounds them (fp8.round_activations). Its h is not bit for bit the kernels', so a few values round the other way;
    second_input(slots, h), where given, says what the second GEMM reads instead of h [slots, I] (float64).
    """
    act = Activation(activation)
    rounded = fp8.round_activations if fp8_activations else Tensor.double
    top_k = topk_ids.shape[1]
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    slot_weights = topk_weights.reshape(-1).double()
    for expert, slots in _slots_by_expert(topk_ids, expert_map, len(w13)):
        weights = slot_weights[slots][:, None]
        h = rounded(x[slots // top_k]) @ w13[expert].double().T
        if router_weight_on_input:
            h = h * weights
        if b13 is not None:
            h = h + b13[expert].double()
        h = activate(h, act, alpha, beta, limit)
        y = (second_input(slots, h) if second_input else rounded(h)) @ w2[expert].double().T
        if b2 is not None:
            y = y + b2[expert].double()
        out.index_add_(0, slots // top_k, y if router_weight_on_input else y * weights)
    return out


oracle_moe_fp8 = partial(oracle_moe, fp8_activations=True)


def activate(h: Tensor, activation: Activation, alpha: float, beta: float, limit: float) -> Tensor:
    """[rows, 2I] ([gate; up]) or, when not gated, [rows, I] -> [rows, I], in h's dtype."""
    if activation is Activation.RELU2:
        return torch.relu(h).square()
    gate, up = h.chunk(2, dim=1)
    if activation is Activation.GELU_TANH:
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    if math.isfinite(limit):
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + beta) * gate * torch.sigmoid(alpha * gate)


def _fp8(weights: PackedProjection) -> bool:
    return weights.weight_format.path == "w4a8"


def _rows(t: Tensor) -> Tensor:
    """[.., rows, columns] -> [rows in all, columns]."""
    return t.flatten(0, -2)


def _expert(
    x: Tensor,
    x_scale: Tensor | None,
    expert: int,
    w13: PackedProjection,
    w2: PackedProjection,
    act: Callable[[Tensor], Tensor],
    hidden: int,
    dtype: torch.dtype,
    weights: Tensor | None = None,
) -> Tensor:
    """fp32 [M, H]: both projections of one expert on x [M, H], h rounded to dtype; weights [M, 1]: of the rows of x."""
    intermediate = w2.packed.shape[2] * CHUNK_K
    rows = w13.packed.shape[1] * BLOCK_ROWS
    up, up_scale, up_bias = unpack_unscaled(
        w13, expert, dtype=dtype, k=hidden, out_features=rows, gated=rows != intermediate
    )
    h = _linear(x, up, up_scale, w13, x_scale)
    if weights is not None:
        h.mul_(weights)
    if up_bias is not None:
        h.add_(up_bias)
    h = act(h)
    down, down_scale, down_bias = unpack_unscaled(
        w2, expert, dtype=dtype, k=intermediate, out_features=hidden, gated=False
    )
    y = _linear(h if _fp8(w2) else h.to(dtype), down, down_scale, w2)
    return y if down_bias is None else y.add_(down_bias)


def _linear(
    x: Tensor, weight: Tensor, row_scale: Tensor, packed: PackedProjection, x_scale: Tensor | None = None
) -> Tensor:
    """fp32 [M, N]: x [M, K] times one expert of `packed`, as unpack_unscaled gives it; x_scale where x is e4m3."""
    product = fp8.linear(x, weight, x_scale) if _fp8(packed) else x.float() @ weight.T
    return product.mul_(row_scale)


def _slots_by_expert(topk_ids: Tensor, expert_map: Tensor | None, num_experts: int) -> Iterator[tuple[int, Tensor]]:
    """(local expert, its slots int64 ascending) for each expert that has any; slot = token * top_k + k."""
    ids = topk_ids.reshape(-1).long()
    known = num_experts if expert_map is None else expert_map.numel()
    valid = (ids >= 0) & (ids < known)
    if expert_map is not None and known:
        ids = torch.where(valid, expert_map.long()[ids.clamp(0, known - 1)], -1)
        valid = (ids >= 0) & (ids < num_experts)
    ids = torch.where(valid, ids, num_experts)
    order = torch.argsort(ids, stable=True)
    start = 0
    for expert, count in enumerate(torch.bincount(ids, minlength=num_experts + 1)[:num_experts].tolist()):
        if count:
            yield expert, order[start : start + count]
        start += count
