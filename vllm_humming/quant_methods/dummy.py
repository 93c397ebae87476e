# SPDX-License-Identifier: Apache-2.0
"""Finite weights for layers whose packed parameters never went through the weight loader.

Two cases, both known only after loading:

* `--load-format dummy`. vLLM writes into the parameters itself: nothing but floats near zero (0.26), random bytes too
  (0.33). Packed bytes are codes and exponents side by side, so what it wrote is thrown away and legal weights are made.
* The packed parameters were written in place (a restored state of this very layout, or a benchmark that fills every
  parameter). A restored state is legal and stays bit for bit; of random bytes only those scale bytes are replaced that
  the format does not have (infinity, NaN). A load that never reached the layer leaves the allocation's zero codes,
  which is how it is told apart and refused.
"""

import math

import torch

from vllm_humming.moe.codes import CODE_BYTES
from vllm_humming.moe.packing import PackedProjection, fitting_k, pack_expert
from vllm_humming.moe.scales import window_of
from vllm_humming.quant_methods.loading import PROJECTIONS, ExpertShape, Projection

_TEMPLATES = 4  # experts made afresh; the others are copies, so that large models start quickly
_SEED = 20240229
# Weights of this size, times up to 8, keep the activations of a layer near the size of its input.
_STEP = 2.0**-9
_SPREAD = 4  # raw scale bytes, from that of _STEP up


def fill_dummy(packed: dict[Projection, PackedProjection], shape: ExpertShape, dtype: torch.dtype) -> None:
    """Overwrites a layer's packed parameters with random legal weights, the same on every run."""
    for projection in PROJECTIONS:
        gated = projection == "w13" and shape.gated
        k = fitting_k(packed[projection], shape.hidden if projection == "w13" else shape.shard)
        rows = shape.shard * (2 if gated else 1) if projection == "w13" else shape.hidden
        fill_dummy_projection(packed[projection], rows, k, gated=gated, dtype=dtype)


def fill_dummy_projection(destination: PackedProjection, rows: int, k: int, *, gated: bool, dtype: torch.dtype) -> None:
    """The same for one projection [E, rows, k] before padding; a bias becomes zero."""
    device, fmt = destination.packed.device, destination.weight_format
    # Formats with a global scale have group scales from 1 up.
    lowest = fmt.one if fmt.has_global else fmt.one + round(math.log2(_STEP))
    global_scale = torch.full((), _STEP, dtype=torch.float32, device=device) if fmt.has_global else None
    generator = torch.Generator(device=device)
    generator.manual_seed(_SEED)
    num_experts = destination.packed.shape[0]
    templates = min(_TEMPLATES, num_experts)
    for expert in range(num_experts):
        if expert >= templates:
            for tensor in destination.tensors:
                if tensor is not None:
                    tensor[expert].copy_(tensor[expert % templates])
            continue
        codes = torch.empty((rows, k // 2), dtype=torch.uint8, device=device).random_(0, 256, generator=generator)
        scales = torch.empty((rows, k // fmt.group_k), dtype=torch.uint8, device=device)
        scales.random_(lowest, lowest + _SPREAD, generator=generator)
        bias = None if destination.bias is None else torch.zeros(rows, device=device)
        pack_expert(
            destination,
            expert,
            codes,
            scales,
            bias,
            global_scale=global_scale,
            gated=gated,
            dtype=dtype,
            layer="dummy weights",
        )


def was_written(packed: dict[Projection, PackedProjection]) -> bool:
    """Whether the packed codes differ from a fresh allocation's, in both projections."""
    return all(bool(p.packed[..., :CODE_BYTES].any()) for p in packed.values())


def replace_illegal_scales(packed: dict[Projection, PackedProjection], dtype: torch.dtype) -> int:
    """Replaces the scale bytes that the format does not have, in place; returns how many there were."""
    replaced = 0
    for p in packed.values():
        window = window_of(dtype)
        legal = torch.tensor(p.weight_format.legal_scales(window), device=p.packed.device)
        for expert in p.packed:
            scales = expert[..., CODE_BYTES:]
            illegal = ~legal[scales.to(torch.int32)]
            replaced += int(illegal.sum())
            scales.masked_fill_(illegal, p.weight_format.small_scale(window))
    return replaced
