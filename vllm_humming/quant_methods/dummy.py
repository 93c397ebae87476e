# SPDX-License-Identifier: Apache-2.0
"""Finite weights for layers whose packed parameters never went through the weight loader.

Two cases, both known only after loading:

* `--load-format dummy`. vLLM writes into the parameters itself: nothing but floats near zero (0.26), random bytes too
  (0.33). Packed bytes are codes and exponents side by side, so what it wrote is thrown away and legal weights are made.
* The packed parameters were written in place (a restored state of this very layout, or a benchmark that fills every
  parameter). A restored state is legal and stays bit for bit; of random bytes only those scale bytes that decode to
  infinity or NaN are replaced. A load that never reached the layer leaves the allocation's zero codes, which is how it
  is told apart and refused.
"""

import torch

from vllm_humming.moe.packing import CODE_BYTES, GROUP_K, PackedProjection, pack_expert
from vllm_humming.quant_methods.loading import PROJECTIONS, ExpertShape, Projection

_TEMPLATES = 4  # experts made afresh; the others are copies, so that large models start quickly
_SEED = 20240229
# Scales 2^-9..2^-6 keep the activations of a layer near the size of its input.
_SCALES = (118, 122)

# dtype -> (largest scale byte that decodes to a finite factor, what stands in for larger ones: 2^-7)
_SCALE_BYTES = {torch.bfloat16: (254, 246), torch.float16: (30, 22)}


def fill_dummy(packed: dict[Projection, PackedProjection], shape: ExpertShape, dtype: torch.dtype) -> None:
    """Overwrites a layer's packed parameters with random legal weights, the same on every run."""
    for projection in PROJECTIONS:
        destination = packed[projection]
        device = destination.packed.device
        gated = projection == "w13" and shape.gated
        k = shape.hidden if projection == "w13" else shape.shard
        rows = shape.shard * (2 if gated else 1) if projection == "w13" else shape.hidden
        generator = torch.Generator(device=device)
        generator.manual_seed(_SEED)
        templates = min(_TEMPLATES, shape.num_experts)
        for expert in range(shape.num_experts):
            if expert >= templates:
                for tensor in destination:
                    if tensor is not None:
                        tensor[expert].copy_(tensor[expert % templates])
                continue
            codes = torch.empty((rows, k // 2), dtype=torch.uint8, device=device).random_(0, 256, generator=generator)
            scales = torch.empty((rows, k // GROUP_K), dtype=torch.uint8, device=device)
            scales.random_(*_SCALES, generator=generator)
            bias = torch.zeros(rows, device=device) if shape.has_bias else None
            pack_expert(destination, expert, codes, scales, bias, gated=gated, dtype=dtype, layer="dummy weights")


def was_written(packed: dict[Projection, PackedProjection]) -> bool:
    """Whether the packed codes differ from a fresh allocation's, in both projections."""
    return all(bool(p.packed[..., :CODE_BYTES].any()) for p in packed.values())


def replace_illegal_scales(packed: dict[Projection, PackedProjection], dtype: torch.dtype) -> int:
    """Replaces the scale bytes that decode to infinity or NaN, in place; returns how many there were."""
    largest, replacement = _SCALE_BYTES[dtype]
    replaced = 0
    for p in packed.values():
        for expert in p.packed:
            scales = expert[..., CODE_BYTES:]
            illegal = scales > largest
            replaced += int(illegal.sum())
            scales.masked_fill_(illegal, replacement)
    return replaced
