# SPDX-License-Identifier: Apache-2.0
"""Synthetic routing: top-k expert ids and weights of a batch."""

import torch
from torch import Tensor

ROUTINGS = ("uniform", "balanced", "zipf", "one-hot")


def route(tokens: int, experts: int, top_k: int, kind: str, gen: torch.Generator) -> tuple[Tensor, Tensor]:
    """(weights fp32 [tokens, top_k], summing to 1 a token, and ids int32 [tokens, top_k]), on gen's device.

    uniform: the top-k of normal logits. balanced: every expert gets the same number of rows, give or take one.
    zipf: distinct experts with probabilities 1/rank. one-hot: uniform, but every token also goes to expert 0.
    """
    shape, device = (tokens, experts), gen.device
    # Not the default dtype, which vLLM sets to the model's.
    logits = torch.randn(shape, device=device, dtype=torch.float32, generator=gen)
    if kind == "balanced":
        weights = logits.softmax(-1)[:, :top_k]
        order = torch.randperm(experts, device=device, generator=gen)
        slots = torch.arange(tokens * top_k, device=device).view(tokens, top_k)
        return (weights / weights.sum(-1, keepdim=True)).contiguous(), order[slots % experts].int()
    if kind == "zipf":
        p = 1.0 / torch.arange(1, experts + 1, device=device, dtype=torch.float32)
        p = p[torch.randperm(experts, device=device, generator=gen)]
        # Gumbel top-k: a sample without replacement
        logits = p.log() - torch.rand(shape, device=device, dtype=torch.float32, generator=gen).log().neg().log()
    elif kind == "one-hot":
        logits[:, 0] += 100
    elif kind != "uniform":
        raise ValueError(f"unknown routing {kind!r}; one of {', '.join(ROUTINGS)}")
    weights, ids = logits.softmax(-1).topk(top_k, -1)
    return (weights / weights.sum(-1, keepdim=True)).contiguous(), ids.int().contiguous()
