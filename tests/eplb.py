# SPDX-License-Identifier: Apache-2.0
"""Layers with redundant experts, and vLLM's own rearrangement of them. Used by test_eplb.py.

Usage: python eplb.py RANK RANKS PORT CASE runs one rank of an expert-parallel group: it loads its share of the case's
layer, rearranges it beside the others over gloo and compares the summed outputs.
"""

import itertools
import sys
from typing import Any

import torch
from layers import CT_MXFP4, CT_NVFP4, Experts, Sizes, apply, build, engine, engine_config, finish, load_one, routing

from vllm_humming.moe.weight_formats import MXFP4, NVFP4

SIZES = Sizes()
REDUNDANT = 2
_numbers = itertools.count()
BEFORE = [0, 1, 2, 3, 0, 1]  # vLLM's first arrangement: logical experts by physical slot
AFTER = [2, 0, 3, 2, 1, 2]
# name: checkpoint, weight format, options, arguments of the layer
CASES: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "mxfp4": (CT_MXFP4, MXFP4, {}, {}),
    "mxfp4-bias": (CT_MXFP4, MXFP4, {}, {"has_bias": True}),
    "mxfp4-relu2": (CT_MXFP4, MXFP4, {}, {"activation": "relu2_no_mul"}),
    "nvfp4": (CT_NVFP4, NVFP4, {}, {}),
    "nvfp4-bias-relu2": (CT_NVFP4, NVFP4, {}, {"has_bias": True, "activation": "relu2_no_mul"}),
    "w4a8": (CT_MXFP4, MXFP4, {"activation": "fp8"}, {}),
    "w4a8-bias": (CT_MXFP4, MXFP4, {"activation": "fp8"}, {"has_bias": True}),
    "w4a8-relu2": (CT_MXFP4, MXFP4, {"activation": "fp8"}, {"activation": "relu2_no_mul"}),
}


def experts_of(case: str) -> Experts:
    _, fmt, _, kwargs = CASES[case]
    gated = not kwargs.get("activation", "").endswith("no_mul")
    return Experts(SIZES, gated=gated, bias=kwargs.get("has_bias", False), fmt=fmt)


def build_case(case: str, redundant: int = REDUNDANT) -> Any:
    """The unloaded layer of a case; call it under engine(eplb=True)."""
    checkpoint, _, _, kwargs = CASES[case]
    name = f"model.layers.{next(_numbers)}.mlp.experts"
    return build(checkpoint, SIZES, name, enable_eplb=True, num_redundant_experts=redundant, **kwargs)


def load_by_mapping(layer: Any, experts: Experts, *, skip: tuple[str, ...] = (), stop_at_success: bool = False) -> None:
    """Loads through vLLM's mapping of checkpoint names to physical experts, as models do.

    skip: "{logical expert}.{projection}.{suffix}" left out. stop_at_success: as the loaders that go on to the next
    tensor when one copy was loaded.
    """
    scheme, projections = layer.quant_method.scheme, {"gate_proj": "w13", "up_proj": "w13", "down_proj": "w2"}
    copies: dict[tuple[int, str, str], list[int]] = {}
    for _, weight_name, physical, shard in layer.get_expert_mapping():
        _, logical, name, _ = weight_name.split(".")
        if name in projections:  # a layer without gate has none, which vLLM 0.26 calls "None"
            copies.setdefault((int(logical), name, shard), []).append(physical)
    for (logical, name, shard), physical_experts in copies.items():
        for suffix, kind in scheme.tensors:
            tensor = experts.tensor(kind, projections[name], logical, shard, reciprocal=scheme.reciprocal_global)
            if tensor is None or f"{logical}.{name}.{suffix}" in skip:
                continue
            for physical in physical_experts:
                loaded = load_one(layer, f"{projections[name]}_{suffix}", tensor, shard, physical)
                if loaded and stop_at_success:
                    break


def physical_ids(ids: torch.Tensor, arrangement: list[int], copy: int = 0) -> torch.Tensor:
    """Logical ids -> ids of that copy of each expert (its last one where it has fewer), -1 stays."""
    slots = [[slot for slot, expert in enumerate(arrangement) if expert == e] for e in range(SIZES.experts)]
    table = torch.tensor([of[min(copy, len(of) - 1)] for of in slots])
    return torch.where(ids >= 0, table[ids.clamp(min=0).long()], -1).int()


def rearrange(layer: Any, before: list[int], after: list[int]) -> None:
    """vLLM's own move of the layer's experts, in place, over the expert-parallel group."""
    from vllm.distributed import get_ep_group
    from vllm.distributed.eplb.eplb_communicator import create_eplb_communicator
    from vllm.distributed.eplb.rebalance_execute import rearrange_expert_weights_inplace

    weights = [list(layer.get_expert_weights())]
    buffer = [torch.empty_like(weight) for weight in weights[0]]
    group = get_ep_group()
    rearrange_expert_weights_inplace(
        torch.tensor([before]),
        torch.tensor([after]),
        weights,
        buffer,
        group.cpu_group,
        create_eplb_communicator(group, "torch_nccl", weights, buffer),
    )


def run_rank(rank: int, ranks: int, port: int, case: str) -> None:
    import torch.distributed as dist
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        destroy_distributed_environment,
        init_distributed_environment,
        initialize_model_parallel,
    )

    parallel = {"tensor_parallel_size": ranks, "enable_expert_parallel": True}
    options = {"additional": {"humming": CASES[case][2]}, "eplb": True} | parallel
    with set_current_vllm_config(engine_config(**options)):
        init_distributed_environment(
            ranks, rank, local_rank=rank, backend="gloo", distributed_init_method=f"tcp://127.0.0.1:{port}"
        )
        initialize_model_parallel(ranks, 1)
    with engine(**options):
        layer = build_case(case)
        load_by_mapping(layer, experts_of(case), stop_at_success=True)
        finish(layer)
        assert layer.w13_packed.shape[0] == len(BEFORE) // ranks

        x, weights, ids = routing(17, SIZES)

        def output(arrangement: list[int], copy: int) -> torch.Tensor:
            total = apply(layer, x, weights, physical_ids(ids, arrangement, copy)).float()
            dist.all_reduce(total)
            return total

        first = output(BEFORE, 0)
        assert first.any()
        rearrange(layer, BEFORE, AFTER)
        moved = [layer.get_parameter(name).clone() for name, _ in layer.named_parameters()]
        # Sums over other ranks come in another order, and a rank's share is rounded to BF16.
        for copy in range(3):
            assert float((output(AFTER, copy) - first).norm() / first.norm()) < 8e-3
        rearrange(layer, AFTER, BEFORE)
        assert torch.equal(output(BEFORE, 0), first)
        rearrange(layer, BEFORE, AFTER)
        for (name, parameter), then in zip(layer.named_parameters(), moved, strict=True):
            assert torch.equal(parameter, then), name
    destroy_distributed_environment()
    print(f"rank {rank} of {ranks} agrees", flush=True)


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
