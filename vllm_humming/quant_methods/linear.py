# SPDX-License-Identifier: Apache-2.0
"""The linear method: FP4 linears outside the experts, as a grouped GEMM of one expert.

vLLM's weight loaders fill parameters under the checkpoint's names; after loading they are packed into the kernels'
layout and dropped.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.parameter import GroupQuantScaleParameter, ModelWeightParameter, PerTensorScaleParameter

import vllm_humming.ops  # noqa: F401  (defines the ops)
from vllm_humming import compat, hardware
from vllm_humming.moe import packing, reference, schedule
from vllm_humming.moe.layouts import GemmLayout
from vllm_humming.moe.packing import PackedProjection
from vllm_humming.moe.weight_formats import BY_CODE
from vllm_humming.options import HummingOptions
from vllm_humming.quant_methods import checks, dummy
from vllm_humming.quant_methods.linear_loading import LinearLoader
from vllm_humming.quant_methods.schemes import ExpertScheme
from vllm_humming.quant_methods.tally import Tally

logger = compat.logger(__name__)

_TALLY = Tally("linear", "weights")
_UNIT = 8  # the kernels write rows of whole multiples of this
_NEVER_LOADED = 0xFF  # a scale byte that no format has


# The name is one of those whose layers vLLM gives its loaders of the second kind.
class HummingLinearMethod(LinearMethodBase):
    """Runs one FP4 linear on 16-bit activations.

    scheme: how the checkpoint stores it, with 16-bit activations. Raises RuntimeError when the machine or the
    installation cannot run options.backend.
    """

    def __init__(self, scheme: ExpertScheme, options: HummingOptions, layer_name: str) -> None:
        super().__init__()
        self.scheme, self.layer_name = scheme, layer_name
        self.weight_format = scheme.weight_format
        self.backend = hardware.resolve_backend(options)
        if scheme.stated:
            logger.info_once(
                "%s linears run with 16-bit activations; the checkpoint says %s",
                self.weight_format.label,
                scheme.stated,
            )
        _TALLY.add(layer_name, self.weight_format.label)

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Registers the checkpoint's tensors of this rank: codes uint8 [N, K/2], scales [N, K/group], globals fp32.

        output_partition_sizes: rows of each fused projection on this rank, N in all. Raises ValueError for a dtype that
        the kernels do not have and for a K, or this rank's share of it, that is no whole number of scale groups.
        """
        fmt = self.weight_format
        self._check_sizes(input_size, input_size_per_partition, params_dtype)
        n, k = sum(output_partition_sizes), input_size_per_partition
        # As vLLM's own methods do; MLA asks for them.
        layer.logical_widths = output_partition_sizes
        layer.input_size_per_partition, layer.output_size_per_partition = k, n
        self._dtype, self._widths, self._k = params_dtype, list(output_partition_sizes), k
        self._dummy = compat.uses_dummy_weights()
        shards = compat.linear_shard_names(layer, self.layer_name, len(self._widths))
        loader = LinearLoader(self.layer_name, self.scheme, layer, shards, input_size)
        self._loader: LinearLoader | None = loader
        self._names = [suffix for suffix, kind in self.scheme.tensors if kind != "bias"]
        for suffix, kind in self.scheme.tensors:
            load = loader.wrap(suffix, kind, extra_weight_attrs["weight_loader"])
            matrix = {"input_dim": 1, "output_dim": 0, "weight_loader": load}
            if kind == "codes":
                data = torch.zeros((n, k // 2), dtype=torch.uint8)
                layer.register_parameter(suffix, ModelWeightParameter(data=data, **matrix))
            elif kind == "scales":
                data = torch.full((n, k // fmt.group_k), _NEVER_LOADED, dtype=torch.uint8).view(loader.scale_dtype)
                layer.register_parameter(suffix, GroupQuantScaleParameter(data=data, **matrix))
            elif kind in ("global", "unused"):
                data = torch.full((len(self._widths),), torch.nan, dtype=torch.float32)
                layer.register_parameter(suffix, PerTensorScaleParameter(data=data, weight_loader=load))
        # vLLM makes the bias after this, with the layer's own loader.
        layer.weight_loader = loader.wrap("bias", "bias", layer.weight_loader)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Packs what was loaded: weight_packed uint8 [1, rows/64, K/128, chunk bytes], row_scale and packed_bias fp32.

        The checkpoint's parameters are dropped. Raises ValueError that names missing tensors, and for scales that the
        activations' dtype cannot hold exactly.
        """
        if self._loader is None:
            return
        codes, scales = (getattr(layer, self._suffix(kind)) for kind in ("codes", "scales"))
        bias: Tensor | None = layer.bias  # type: ignore[assignment]
        packed = packing.allocate(
            1,
            sum(self._widths),
            self._k,
            gated=False,
            has_bias=bias is not None,
            device=codes.device,
            weight_format=self.weight_format,
        )
        if self._dummy:
            dummy.fill_dummy_projection(packed, sum(self._widths), self._k, gated=False, dtype=self._dtype)
        else:
            self._loader.check_complete(bias is not None)
            packing.pack_expert(
                packed,
                0,
                codes.data,
                scales.data,
                None if bias is None else bias.data.float(),
                global_scale=self._row_globals(layer),
                gated=False,
                dtype=self._dtype,
                layer=self.layer_name,
                where=f"{self.layer_name}: {self._suffix('codes')}",
            )
        self._loader.packed = True
        self._loader = None
        layer.__dict__.pop("weight_loader")
        for name in self._names:
            delattr(layer, name)
        # vLLM looks for a quantised linear's device under the first name (MLA, LoRA).
        for name, tensor in zip(("weight_packed", "row_scale", "packed_bias"), packed.tensors, strict=True):
            if tensor is not None:
                layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        logger.debug("%s: %s, %s path", self.layer_name, self.weight_format.label, self.backend)
        if line := _TALLY.done(self.backend):
            logger.info(line)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [.., K] bf16 or fp16 -> [.., N] in x's dtype: x times the weights, plus bias [N]. x is only read."""
        if x.dtype != self._dtype:  # the packed bits are laid out for one dtype
            raise ValueError(
                f"{self.layer_name}: weights packed for {self._dtype} activations, found x of {x.dtype}; start the "
                "engine with that dtype"
            )
        if x.shape[-1] != self._k:  # the op takes fewer channels, and those of padding
            raise ValueError(f"{self.layer_name}: x must have {self._k} channels, found shape {tuple(x.shape)}")
        if bias is not None:
            rows = layer.row_scale.shape[1]
            bias = layer.packed_bias if bias is layer.bias else F.pad(bias.float(), (0, rows - bias.shape[0]))[None]
        return torch.ops.vllm_humming.linear(
            x,
            layer.weight_packed,
            layer.row_scale,
            bias,
            sum(self._widths),
            self.weight_format.code,
            self.backend == "reference",
        )

    def _check_sizes(self, input_size: int, share: int, dtype: torch.dtype) -> None:
        fmt, name = self.weight_format, self.layer_name
        if dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"{name}: activations must be bfloat16 or float16, found {dtype}; set --dtype")
        if input_size % fmt.group_k:
            raise ValueError(
                f"{name}: {fmt.label} needs the input size to be a multiple of {fmt.group_k}, found {input_size}"
            )
        if share % fmt.group_k:
            raise ValueError(
                f"{name}: {input_size // share} ranks have {share} of {input_size} input features each, which cuts a "
                f"scale group of {fmt.group_k}; use a --tensor-parallel-size that divides "
                f"{input_size // fmt.group_k}"
            )

    def _suffix(self, kind: str) -> str:
        return next(suffix for suffix, found in self.scheme.tensors if found == kind)

    def _row_globals(self, layer: nn.Module) -> Tensor | None:
        """fp32 [N]: every fused projection keeps the global scale that it was quantised with."""
        if not self.weight_format.has_global:
            return None
        suffix = self._suffix("global")
        stored: Tensor = getattr(layer, suffix)
        factors = checks.global_factors(
            f"{self.layer_name}: {suffix}", stored.data, reciprocal=self.scheme.reciprocal_global
        )
        return factors.repeat_interleave(torch.tensor(self._widths, device=factors.device))


# One op, so that a compiled model does not look inside: tile and scratch depend on the number of rows of each call.
_fragment = torch.library.Library("vllm_humming", "FRAGMENT")
_fragment.define(
    "linear(Tensor x, Tensor packed, Tensor row_scale, Tensor? bias, int out_features, int weight_format, "
    "bool reference) -> Tensor"
)


def _linear(
    x: Tensor,
    packed: Tensor,
    row_scale: Tensor,
    bias: Tensor | None,
    out_features: int,
    weight_format: int,
    use_reference: bool,
) -> Tensor:
    k, n = x.shape[-1], packing.round_up(out_features, _UNIT)
    rows = x.reshape(-1, k).contiguous()
    out = rows.new_empty((rows.shape[0], n))
    if out.shape[0]:
        fmt = BY_CODE[weight_format]
        if use_reference:
            weights = PackedProjection(packed, row_scale, bias, fmt)
            reference.grouped_gemm(rows, None, weights, None, None, out, GemmLayout.CONTIGUOUS)
        else:
            size = torch.ops.vllm_humming.grouped_gemm_workspace_bytes(
                rows.shape[0], 1, k, weight_format, GemmLayout.CONTIGUOUS
            )
            # Not the scratch that the MoE layers share: vLLM runs shared experts on a stream of their own beside them.
            scratch = rows.new_empty((size,), dtype=torch.uint8)
            torch.ops.vllm_humming.grouped_gemm(
                rows,
                None,
                packed,
                row_scale,
                bias,
                None,
                None,
                scratch,
                out,
                GemmLayout.CONTIGUOUS,
                weight_format,
                schedule.select_gemm(rows.shape[0], 1, n, k, fmt.path),
            )
    return out[:, :out_features].contiguous().view(*x.shape[:-1], out_features)


def _linear_fake(
    x: Tensor,
    packed: Tensor,
    row_scale: Tensor,
    bias: Tensor | None,
    out_features: int,
    weight_format: int,
    use_reference: bool,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


_fragment.impl("linear", _linear, "CompositeExplicitAutograd")
torch.library.register_fake("vllm_humming::linear", _linear_fake, lib=_fragment)
