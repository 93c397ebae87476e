# SPDX-License-Identifier: Apache-2.0
"""Runs one layer's packed experts: scratch, tiles and the call of the operator, for every way that tokens come."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import vllm_humming.ops  # noqa: F401  (defines the ops)
from vllm_humming.moe import reference, schedule
from vllm_humming.moe.activation import ActivationSpec
from vllm_humming.moe.codes import CHUNK_K
from vllm_humming.moe.packing import PackedProjection
from vllm_humming.moe.weight_formats import WeightFormat
from vllm_humming.quant_methods.loading import PROJECTIONS, Projection


@dataclass
class PackedLayer:
    """One layer's experts and how they run.

    layer: holds the packed parameters, which are looked up at each call. name: for errors. dtype: what the experts are
    packed for and return, bfloat16 or float16. backend: "kernel" or "reference".
    """

    layer: Any
    name: str
    weight_format: WeightFormat
    activation: ActivationSpec
    dtype: torch.dtype
    backend: str

    def workspace_bytes(self, tokens: int, top_k: int, hidden: int) -> int:
        """Bytes of scratch that run() needs for x [tokens, hidden]."""
        if self.backend == "reference":
            return 0
        experts, intermediate = self._sizes()
        size: int = torch.ops.vllm_humming.moe_workspace_bytes(
            tokens, top_k, experts, hidden, intermediate, self.weight_format.code
        )
        return size

    def batched_workspace_bytes(self, rows: int, hidden: int) -> int:
        """Bytes of scratch that run_batched() needs for x [E, rows, hidden]."""
        if self.backend == "reference":
            return 0
        experts, intermediate = self._sizes()
        size: int = torch.ops.vllm_humming.moe_batched_workspace_bytes(
            rows, experts, hidden, intermediate, self.weight_format.code
        )
        return size

    def run(
        self,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        workspace: Tensor,
        out: Tensor,
        *,
        router_weight_on_input: bool = False,
    ) -> None:
        """Writes x [M, H] through this rank's experts, weighted and summed over top-k, to out [M, H]; M > 0.

        topk_weights, topk_ids [M, k], ids global; -1 and ids of other ranks contribute nothing. x and out contiguous,
        workspace of workspace_bytes() in any dtype. Raises ValueError for x of another dtype than self.dtype.
        """
        self._check_dtype(x)
        spec, expert_map = self.activation, self.layer.expert_map
        topk_weights = topk_weights.to(torch.float32).contiguous()
        topk_ids = topk_ids.to(torch.int32).contiguous()
        if self.backend == "reference" and x.is_cuda:
            packed = packed_of(self.layer, self.weight_format)
            reference.moe(
                x,
                topk_weights,
                topk_ids,
                expert_map,
                packed["w13"],
                packed["w2"],
                out,
                activation=spec.code,
                alpha=spec.alpha,
                beta=spec.beta,
                limit=spec.limit,
                router_weight_on_input=router_weight_on_input,
            )
            return
        tile1, tile2 = self._tiles(x.shape[0], topk_ids.shape[1], x.shape[1])
        torch.ops.vllm_humming.moe(
            x,
            topk_weights,
            topk_ids,
            expert_map,
            *self._tensors(),
            workspace.view(torch.uint8),
            out,
            self.weight_format.code,
            int(spec.code),
            spec.alpha,
            spec.beta,
            spec.limit,
            router_weight_on_input,
            tile1,
            tile2,
        )

    def run_batched(
        self,
        x: Tensor,
        x_scale: Tensor | None,
        counts: Tensor,
        tokens: int,
        top_k: int,
        workspace: Tensor,
        out: Tensor,
    ) -> None:
        """Writes each expert's first counts[e] rows of x [E, max, H], unweighted, to out [E, max, H]; other rows stay.

        x: of self.dtype or, for FP8 experts, e4m3 with x_scale fp32 [E, max, ceil(H / 128)], contiguous or as
        layouts.scales_m_major. counts int32 [E]. tokens and top_k: tokens of all ranks and the experts of each; tiles
        are chosen by them. workspace: of batched_workspace_bytes() in any dtype. Raises ValueError for another x.
        """
        if x_scale is None:
            self._check_dtype(x)
        spec = self.activation
        if self.backend == "reference" and x.is_cuda:
            packed = packed_of(self.layer, self.weight_format)
            reference.moe_batched(
                x,
                x_scale,
                counts,
                packed["w13"],
                packed["w2"],
                out,
                activation=spec.code,
                alpha=spec.alpha,
                beta=spec.beta,
                limit=spec.limit,
            )
            return
        tile1, tile2 = self._tiles(tokens, top_k, x.shape[2])
        torch.ops.vllm_humming.moe_batched(
            x,
            x_scale,
            counts,
            *self._tensors(),
            workspace.view(torch.uint8),
            out,
            self.weight_format.code,
            int(spec.code),
            spec.alpha,
            spec.beta,
            spec.limit,
            tile1,
            tile2,
        )

    def _check_dtype(self, x: Tensor) -> None:
        if x.dtype != self.dtype:  # the packed bits are laid out for one dtype
            raise ValueError(
                f"{self.name}: experts packed for {self.dtype} activations, found x of {x.dtype}; "
                "start the engine with that dtype"
            )

    def _sizes(self) -> tuple[int, int]:
        """(local experts, padded intermediate size)."""
        return self.layer.w2_packed.shape[0], self.layer.w2_packed.shape[2] * CHUNK_K

    def _tiles(self, tokens: int, top_k: int, hidden: int) -> tuple[int, int]:
        """The two GEMMs' tiles. Depends on shapes alone, so it is the same in CUDA graph capture."""
        if self.backend == "reference":
            return 0, 0
        experts, intermediate = self._sizes()
        global_experts = experts if self.layer.expert_map is None else self.layer.expert_map.shape[0]
        gated = self.activation.code.gated
        return schedule.select(
            tokens, top_k, experts, hidden, intermediate, gated, global_experts, self.weight_format.path
        )

    def _tensors(self) -> tuple[Tensor | None, ...]:
        """The ops' weight arguments: packed codes, row scale and bias of w13, then of w2."""
        return tuple(
            getattr(self.layer, f"{projection}_{name}", None)
            for projection in PROJECTIONS
            for name in ("packed", "row_scale", "packed_bias")
        )


def packed_of(layer: nn.Module, weight_format: WeightFormat) -> dict[Projection, PackedProjection]:
    """The packed parameters of a layer, w13 first."""
    return {
        projection: PackedProjection(
            getattr(layer, f"{projection}_packed"),
            getattr(layer, f"{projection}_row_scale"),
            getattr(layer, f"{projection}_packed_bias", None),
            weight_format,
        )
        for projection in PROJECTIONS
    }
