# SPDX-License-Identifier: Apache-2.0
"""The experts as a part of vLLM's modular kernel: all-to-all backends that bring tokens to the experts themselves.

A backend's prepare step dispatches tokens, the experts here run, and its finalize step combines. Two formats:

* batched (DeepEP low latency, NIXL EP): tokens lie by expert, [E, max, H], with a count an expert; the combine step
  weights and sums. MXFP4 experts that run with FP8 activations get e4m3 tokens with a scale for each 128 channels.
* standard (DeepEP high throughput, DeepEP v2): rows [M, H] with ids and weights as in HummingMoEMethod.apply, weighted
  and summed here over this rank's experts. Tokens are 16-bit; FP8 experts quantise them in the layer.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.model_executor.layers.fused_moe import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantDesc
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

from vllm_humming import compat
from vllm_humming.moe.experts import PackedLayer
from vllm_humming.moe.fp8 import BLOCK_K
from vllm_humming.moe.packing import BLOCK_ROWS

Shape = tuple[int, ...]


def quant_config(experts: PackedLayer, *, batched: bool) -> FusedMoEQuantConfig:
    """What the backend's prepare step is told: how tokens travel.

    The block of 128 x 128 is how vLLM spells e4m3 tokens with a scale for each 128 channels; its backends dispatch FP8
    for exactly that.
    """
    fp8 = batched and experts.weight_format.path == "w4a8"
    tokens = FusedMoEQuantDesc(torch.float8_e4m3fn, GroupShape(BLOCK_K, BLOCK_K)) if fp8 else FusedMoEQuantDesc()
    weights = FusedMoEQuantDesc()  # the packed layout is this package's own
    return FusedMoEQuantConfig(_a1=tokens, _a2=tokens, _w1=weights, _w2=weights)


def make_kernel(experts: PackedLayer, moe: Any, config: FusedMoEQuantConfig) -> mk.FusedMoEKernel:
    """The kernel of a loaded layer for the all-to-all backend of moe, its FusedMoEConfig."""
    prepare_finalize = compat.make_prepare_finalize(moe, config, experts.layer._expert_routing_tables())
    if prepare_finalize.activation_format is not mk.FusedMoEActivationFormat.BatchedExperts:
        return mk.FusedMoEKernel(prepare_finalize, StandardExperts(experts, moe, config))
    batched = BatchedExperts(
        experts,
        moe,
        config,
        max_num_tokens=prepare_finalize.max_num_tokens_per_rank(),
        num_dispatchers=prepare_finalize.num_dispatchers(),
    )
    return mk.FusedMoEKernel(prepare_finalize, batched)


class _Experts(mk.FusedMoEExpertsModular):
    """What both formats share. vLLM's oracles never choose these classes, so the answers to their questions are plain:
    HummingMoEMethod has checked device, activation, sizes and backend before."""

    def __init__(self, experts: PackedLayer, moe: Any, config: FusedMoEQuantConfig, **batched: int | None) -> None:
        super().__init__(moe_config=moe, quant_config=config, **batched)
        self.experts = experts

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return True

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return True

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True

    def moe_problem_size(self, a1: Tensor, w1: Tensor, w2: Tensor, topk_ids: Tensor) -> tuple[int, int, int, int, int]:
        """(E, M, N, K, top-k) of packed weights; M is the rows of one expert where tokens lie by expert."""
        return w1.shape[0], a1.shape[-2], w1.shape[1] * BLOCK_ROWS, a1.shape[-1], topk_ids.shape[1]

    def _scratch_shape(self, size: int) -> Shape:
        return (-(-size // self.experts.dtype.itemsize),)  # vLLM's workspaces have the activations' dtype


class BatchedExperts(_Experts):
    """Tokens [E, max, H] that lie by expert, 16 bits wide or e4m3 with scales [E, max, H / 128]."""

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.BatchedExperts

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceDelegate()

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        activation: Any,
    ) -> tuple[Shape, Shape, Shape]:
        size = self.experts.batched_workspace_bytes(M, K)
        return (0,), self._scratch_shape(size), (local_num_experts, M, K)

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Writes each expert's counted rows of hidden_states [E, max, H] to output [E, max, H]; other rows stay."""
        counts = None if expert_tokens_meta is None else expert_tokens_meta.expert_num_tokens
        if counts is None:
            raise ValueError(f"{self.experts.name}: batched tokens came without their counts")
        # vLLM's own reference of a batched backend counts the experts of all ranks, this rank's first.
        counts = counts[: hidden_states.shape[0]]
        # Each rank has about as many tokens as this one.
        tokens = topk_ids.shape[0] * (self.num_dispatchers or 1)
        self.experts.run_batched(hidden_states, a1q_scale, counts, tokens, topk_ids.shape[1], workspace2, output)


class StandardExperts(_Experts):
    """Rows [M, H] of bf16 with global ids and weights [M, k]; ids of other ranks and -1 contribute nothing."""

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        activation: Any,
    ) -> tuple[Shape, Shape, Shape]:
        size = self.experts.workspace_bytes(M, topk, K)
        return (0,), self._scratch_shape(size), (M, K)

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Writes this rank's experts of hidden_states [M, H], weighted and summed over top-k, to output [M, H]."""
        if apply_router_weight_on_input:  # the prepare step did
            topk_weights = torch.ones_like(topk_weights)
        self.experts.run(hidden_states, topk_weights, topk_ids, workspace2, output)
