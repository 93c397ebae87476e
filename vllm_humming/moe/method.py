# SPDX-License-Identifier: Apache-2.0
"""The MoE method: vLLM's interface to one layer of routed FP4 experts.

vLLM routes, then calls apply() with the chosen experts; apply() returns this rank's weighted sum over top-k and vLLM
adds up ranks and shared experts. No modular kernel is involved (`moe_kernel` stays None), which serves tensor and
expert parallelism, and data parallelism over vLLM's all-gather/reduce-scatter backend. Other all-to-all backends get a
modular kernel (vllm_humming.moe.modular), which apply() hands over to.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase

from vllm_humming import compat, hardware
from vllm_humming.moe import modular, packing
from vllm_humming.moe.activation import activation_spec
from vllm_humming.moe.codes import CHUNK_K
from vllm_humming.moe.experts import PackedLayer, packed_of
from vllm_humming.moe.fp8 import Rounding
from vllm_humming.moe.packing import PackedProjection
from vllm_humming.options import HummingOptions
from vllm_humming.quant_methods import dummy
from vllm_humming.quant_methods.loading import PROJECTIONS, ExpertLoader, ExpertShape, Projection
from vllm_humming.quant_methods.schemes import ExpertScheme, TensorKind
from vllm_humming.quant_methods.tally import Tally

logger = compat.logger(__name__)

_PLACEHOLDER_DTYPES = {
    "codes": torch.uint8,
    "scales": torch.uint8,
    "global": torch.float32,
    "unused": torch.float32,
}
# vLLM's loaders of fused checkpoints treat a scale like its weight where it says "block".
_PLACEHOLDER_LAYOUTS = {"scales": "block", "global": "tensor", "unused": "tensor"}

_TALLY = Tally("MoE layer", "experts")


class HummingMoEMethod(FusedMoEMethodBase):
    """Runs one MoE layer's FP4 experts, on 16-bit or FP8 activations.

    moe: the layer's FusedMoEConfig. Raises NotImplementedError for what this method does not do (LoRA on experts,
    all-to-all backends that are not known to compat), ValueError for an
    activation, dtype or size that the kernels do not have and for FP8 activations that these weights do not run with,
    RuntimeError when the machine or the installation cannot run options.backend.
    """

    def __init__(self, moe: Any, scheme: ExpertScheme, options: HummingOptions, layer_name: str) -> None:
        super().__init__(moe)
        self.scheme = scheme
        self.layer_name = layer_name
        self.all2all = compat.all2all_backend(moe.moe_parallel_config)
        self._refuse_unsupported()
        self.backend = hardware.resolve_backend(options)
        self.weight_format = scheme.packed_format(options.activation, layer_name)
        self.weight_dtype = scheme.weight_format.name  # vLLM's gpt-oss loader asks for it
        fp8 = self.weight_format.path == "w4a8"
        self.label = f"{scheme.weight_format.label} x FP8" if fp8 else scheme.weight_format.label
        if scheme.stated:
            logger.info_once(
                "%s experts run with %s activations; the checkpoint says %s",
                scheme.weight_format.label,
                "dynamic FP8 (a scale a token and 128 channels)" if fp8 else "16-bit",
                scheme.stated,
            )
        _TALLY.add(layer_name, self.label)

    @property
    def supports_eplb(self) -> bool:
        """Every parameter that is left after loading has one contiguous row an expert, which vLLM may move in place."""
        return True

    @property
    def uses_modular_kernel(self) -> bool:
        """Whether an all-to-all backend brings tokens to the experts, by a kernel that is made after loading."""
        return self.all2all in compat.MODULAR_BACKENDS

    @property
    def topk_indices_dtype(self) -> torch.dtype | None:
        if self.moe_kernel is not None:
            ids: torch.dtype | None = self.moe_kernel.prepare_finalize.topk_indices_dtype()
            return ids
        return torch.int32

    def get_fused_moe_quant_config(self, layer: nn.Module) -> Any:
        if not self.uses_modular_kernel:
            return None
        return modular.quant_config(self.experts, batched=self.all2all in compat.BATCHED_BACKENDS)

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: torch.dtype, moe_parallel_config: Any
    ) -> tuple[int, int]:
        if self.uses_modular_kernel:  # some backends move tokens of certain sizes only
            hidden_size, _ = super().maybe_roundup_sizes(
                hidden_size, intermediate_size_per_partition, act_dtype, moe_parallel_config
            )
        # A rank's share is a whole number of scale groups, as vLLM's gpt-oss loader slices it (2880 / 4 -> 736).
        groups = -(-self.moe.intermediate_size // self.weight_format.group_k)
        return hidden_size, -(-groups // self.moe.tp_size) * self.weight_format.group_k

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Allocates the packed parameters and registers the checkpoint's names as empty placeholders.

        num_experts is the local count E. Parameters: w13_packed, w2_packed uint8 [E, rows/64, K/128, chunk bytes],
        *_row_scale and, with biases, *_packed_bias fp32 [E, rows]; docs/kernel-notes.md has the layout. One more, a
        byte an expert, has the layout in its name: packed_for_bfloat16, packed_for_float16 or packed_for_e4m3.
        """
        if compat.uses_elastic_ep():
            raise NotImplementedError(
                f"{self.layer_name}: --quantization humming does not run with elastic expert parallelism; leave out "
                "--enable-elastic-ep (--enable-eplb runs)"
            )
        dtype = self.moe.in_dtype
        if dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"{self.layer_name}: activations must be bfloat16 or float16, found {dtype}; set --dtype")
        if self.uses_modular_kernel and dtype != torch.bfloat16:
            raise ValueError(
                f"{self.layer_name}: the all-to-all backend {self.all2all!r} moves bfloat16 activations, found "
                f"{dtype}; set --dtype bfloat16 or --all2all-backend allgather_reducescatter"
            )
        hidden = int(extra_weight_attrs.get("unpadded_hidden_size") or hidden_size)
        sizes = {"hidden_size": hidden, "intermediate_size": self.moe.intermediate_size}
        fmt, group = self.weight_format, self.weight_format.group_k
        for name, size in sizes.items():
            if size % group:
                raise ValueError(
                    f"{self.layer_name}: {fmt.label} needs {name} to be a multiple of {group}, found {size}"
                )
        self.activation = activation_spec(layer, self.moe, self.layer_name)
        gated = self.activation.code.gated
        shape = ExpertShape(
            num_experts=num_experts,
            hidden=hidden,
            intermediate=self.moe.intermediate_size,
            shard=intermediate_size_per_partition,
            tp_rank=self.moe.tp_rank,
            gated=gated,
            interleaved=self.activation.interleaved,
            has_bias=self.moe.has_bias,
        )
        rows = shape.shard * (2 if gated else 1)
        make: dict[str, Any] = {
            "has_bias": shape.has_bias,
            "device": torch.empty(0).device,
            "weight_format": self.weight_format,
        }
        packed: dict[Projection, PackedProjection] = {
            # Both paddings of I are those of w2's K, so that padded channels meet zero codes on either side. H may be
            # the larger one that a backend moves.
            "w13": packing.allocate(num_experts, rows, hidden_size, gated=gated, pad_rows_to=CHUNK_K, **make),
            "w2": packing.allocate(num_experts, hidden_size, shape.shard, gated=False, **make),
        }
        for projection, weights in packed.items():
            for name, tensor in zip(("packed", "row_scale", "packed_bias"), weights.tensors, strict=True):
                if tensor is not None:
                    layer.register_parameter(f"{projection}_{name}", nn.Parameter(tensor, requires_grad=False))
        # The layouts of packed codes differ by what they decode to, not in shape: a saved state must not fit another.
        decoded = "e4m3" if self.weight_format.path == "w4a8" else str(dtype).removeprefix("torch.")
        marker = nn.Parameter(torch.zeros((num_experts, 1), dtype=torch.uint8), requires_grad=False)
        layer.register_parameter(f"packed_for_{decoded}", marker)
        self._dtype, self._shape = dtype, shape
        self.experts = PackedLayer(layer, self.layer_name, fmt, self.activation, dtype, self.backend)
        self._dummy = compat.uses_dummy_weights()
        self._loader: ExpertLoader | None = ExpertLoader(
            self.layer_name, self.scheme, shape, packed_of(layer, self.weight_format), dtype
        )
        self._placeholders: list[str] = []
        for projection in PROJECTIONS:
            for suffix, kind in self.scheme.tensors:
                if kind != "bias" or shape.has_bias:
                    self._add_placeholder(layer, projection, suffix, kind)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Checks that every expert arrived and was taken, and drops the loading state.

        Raises ValueError that names the missing tensors, or what is wrong with one. See
        vllm_humming.quant_methods.dummy for layers that no checkpoint was loaded into.
        """
        if self._loader is None:
            return
        packed = packed_of(layer, self.weight_format)
        if self._dummy:
            dummy.fill_dummy(packed, self._shape, self._dtype)
        elif not self._loader.touched and dummy.was_written(packed):
            replaced = dummy.replace_illegal_scales(packed, self._dtype)
            logger.warning(
                "%s: packed weights were written past the weight loader; %d scale bytes that are no finite number were "
                "replaced",
                self.layer_name,
                replaced,
            )
        else:
            self._loader.check_complete()
            self._report_rounding(self._loader.rounding)
        self._loader = None
        for name in self._placeholders:
            delattr(layer, name)
        if self.uses_modular_kernel:
            self.moe_quant_config = self.get_fused_moe_quant_config(layer)
            self.moe_kernel = modular.make_kernel(self.experts, self.moe, self.moe_quant_config)
        self._report()

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """x [M, H] bf16 or fp16 -> [M, H]: this rank's experts, weighted and summed over top-k. x is only read.

        topk_weights [M, k]; topk_ids [M, k] global expert ids, -1 and ids of other ranks contribute nothing. Without a
        modular kernel shared_experts is ignored: vLLM runs them itself.
        """
        if self.moe_kernel is not None:
            result: Tensor = self.moe_kernel.apply(
                x,
                layer.w13_packed,
                layer.w2_packed,
                topk_weights=topk_weights,
                topk_ids=topk_ids,
                activation=layer.activation,
                global_num_experts=layer.global_num_experts,
                expert_map=layer.expert_map,
                apply_router_weight_on_input=layer.apply_router_weight_on_input,
                shared_experts=shared_experts,
                shared_experts_input=shared_experts_input,
            )
            return result
        x = x.contiguous()
        out = torch.empty_like(x)
        if x.shape[0]:
            size = self.experts.workspace_bytes(x.shape[0], topk_ids.shape[1], x.shape[1])
            workspace = compat.workspace((size,), torch.uint8) if size else x.new_empty(0, dtype=torch.uint8)
            on_input = bool(layer.apply_router_weight_on_input)
            self.experts.run(x, topk_weights, topk_ids, workspace, out, router_weight_on_input=on_input)
        return out

    def _refuse_unsupported(self) -> None:
        moe, name = self.moe, self.layer_name
        if moe.is_lora_enabled:
            raise NotImplementedError(
                f"{name}: --quantization humming has no LoRA on experts, and vLLM puts it on every MoE layer when LoRA "
                "is enabled; leave out --enable-lora or --quantization humming"
            )
        if self.all2all not in (None, "allgather_reducescatter", *compat.MODULAR_BACKENDS):
            raise NotImplementedError(
                f"{name}: --quantization humming does not run with the all-to-all backend {self.all2all!r}; "
                f"use --all2all-backend allgather_reducescatter, {', '.join(compat.MODULAR_BACKENDS)}"
            )

    def _add_placeholder(self, layer: nn.Module, projection: Projection, suffix: str, kind: TensorKind) -> None:
        name = f"{projection}_{suffix}"
        dtype = _PLACEHOLDER_DTYPES.get(kind, self._dtype)
        placeholder = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
        if kind in _PLACEHOLDER_LAYOUTS:
            placeholder.quant_method = _PLACEHOLDER_LAYOUTS[kind]  # type: ignore[attr-defined]
        placeholder.weight_loader = self._weight_loader(layer, projection, kind)  # type: ignore[attr-defined]
        layer.register_parameter(name, placeholder)
        self._placeholders.append(name)

    def _weight_loader(self, layer: nn.Module, projection: Projection, kind: TensorKind) -> Callable[..., bool | None]:
        """What vLLM's model code calls for one placeholder, in the signature of RoutedExperts.weight_loader."""

        def load(
            param: nn.Parameter,
            loaded_weight: Tensor,
            weight_name: str = "",
            shard_id: str | None = None,
            expert_id: int | None = None,
            return_success: bool = False,
        ) -> bool | None:
            if self._loader is None:
                raise RuntimeError(
                    f"{self.layer_name}: {weight_name} came after the weights were packed; packed experts cannot be "
                    "reloaded in place, start the engine anew"
                )
            if kind == "global" and loaded_weight.numel() > 1 and shard_id is not None:
                return self._load_every_global(layer, projection, loaded_weight, shard_id, return_success)
            if expert_id is None:
                self._loader.load(projection, kind, loaded_weight, shard_id, None)
                return True if return_success else None
            slots = self._load_expert(layer, projection, kind, loaded_weight, shard_id, expert_id)
            if not slots:  # another rank's
                return False if return_success else None
            return True if return_success else None

        load.supports_moe_loading = True  # type: ignore[attr-defined]
        return load

    def _load_expert(
        self,
        layer: nn.Module,
        projection: Projection,
        kind: TensorKind,
        tensor: Tensor,
        shard: str | None,
        expert: int,
    ) -> tuple[int, ...]:
        """Loads a tensor of one expert into all of its copies here; returns their slots.

        Some of vLLM's loaders go through the physical experts, others through the logical ones or stop at the first
        copy on this rank. A redundant copy's own turn therefore brings nothing new.
        """
        assert self._loader is not None
        logical = int(layer.moe_config.num_logical_experts)  # type: ignore[union-attr, arg-type]
        slots = compat.replica_slots(layer, expert % logical)
        if expert < logical:
            for slot in slots:
                self._loader.load(projection, kind, tensor, shard, slot)
        return slots

    def _load_every_global(
        self, layer: nn.Module, projection: Projection, stacked: Tensor, shard: str, return_success: bool
    ) -> bool | None:
        """The global scales [experts] or, for gate and up, [experts, 2], which vLLM hands over as if one expert's.

        Checkpoints that fuse all experts into one tensor come so. Raises ValueError for another shape.
        """
        assert self._loader is not None
        experts = int(layer.moe_config.num_logical_experts)  # type: ignore[union-attr, arg-type]
        columns = stacked.numel() // experts
        if stacked.shape[0] != experts or stacked.numel() not in (experts, 2 * experts if projection == "w13" else 0):
            wanted = f"({experts},) or ({experts}, 2)" if projection == "w13" else f"({experts},)"
            raise ValueError(
                f"{self.layer_name}: {shard} global scales of all experts must have shape {wanted}, "
                f"found {tuple(stacked.shape)}"
            )
        values = stacked.reshape(experts, columns)[:, columns - 1 if shard == "w3" else 0]
        for expert, value in enumerate(values):
            self._load_expert(layer, projection, "global", value, shard, expert)
        return True if return_success else None

    def _report_rounding(self, rounding: Rounding) -> None:
        if rounding.groups:
            logger.info(
                "%s: %d of %d scale groups (%.2g %%) are too small beside the largest of their row for e4m3 and were "
                "rounded; no weight changed by more than %.1e of its row's largest",
                self.layer_name,
                rounding.groups,
                rounding.total,
                100 * rounding.groups / rounding.total,
                rounding.worst,
            )

    def _report(self) -> None:
        logger.debug("%s: %s experts, %s path", self.layer_name, self.label, self.backend)
        if line := _TALLY.done(self.backend):
            logger.info(line)
