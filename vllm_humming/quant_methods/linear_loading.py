# SPDX-License-Identifier: Apache-2.0
"""Stands between vLLM's weight loaders and the checkpoint parameters of one quantised linear.

vLLM's loaders know how every architecture fuses and shards its projections, so they do the slicing; but they copy
values, whatever the dtype, cut tensors that are too long, and do not know what never came. So each tensor is checked
and turned into raw bytes before they see it, and its arrival is written down.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vllm_humming import compat
from vllm_humming.quant_methods import checks
from vllm_humming.quant_methods.schemes import ExpertScheme, TensorKind

_BIAS = "bias"
_WHOLE = object()  # all shards came in one tensor


class LinearLoader:
    """Checks the tensors of one linear on their way into its parameters.

    layer: one of vLLM's linears. shards: the checkpoint's names of the projections fused in it, one per shard of the
    output. input_size: K of the whole model.
    """

    def __init__(self, name: str, scheme: ExpertScheme, layer: nn.Module, shards: list[str], input_size: int) -> None:
        self.name, self.scheme, self.layer, self.shards, self.input_size = name, scheme, layer, shards, input_size
        self.packed = False
        # What most checkpoints have: vLLM warns of parameters that differ.
        self.scale_dtype = torch.float8_e4m3fn if scheme.weight_format.has_global else torch.uint8
        self._arrived: dict[str, set[Any]] = {}

    def wrap(self, suffix: str, kind: TensorKind, inner: Callable[..., None]) -> Callable[..., None]:
        """A weight_loader for the parameter `suffix` that hands what it has checked to vLLM's own one, `inner`.

        It raises ValueError naming layer, shard and tensor for a wrong shape or dtype, a scale that is NaN, negative or
        no value of the format, a global scale that is not positive and finite, NaN or infinity in a bias, and a tensor
        that vLLM's loader does not take; RuntimeError once the weights are packed.
        """

        def load(param: nn.Parameter, loaded_weight: Tensor, loaded_shard_id: Any = None) -> None:
            if self.packed:
                raise RuntimeError(
                    f"{self.name}: {suffix} came after the weights were packed; packed linears cannot be reloaded in "
                    "place, start the engine anew"
                )
            if kind == "unused":
                return
            shard = () if loaded_shard_id is None else (loaded_shard_id,)
            where = self._where(suffix, loaded_shard_id)
            try:
                rows = compat.linear_checkpoint_rows(self.layer, loaded_shard_id)
            except (IndexError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{where} came as shard {loaded_shard_id!r}, which {type(self.layer).__name__} does not have"
                ) from error
            tensor = self._checked(where, kind, loaded_weight, rows)
            try:
                inner(param, tensor, *shard)
            except (AssertionError, IndexError, RuntimeError, ValueError) as error:
                raise ValueError(
                    f"{where} of shape {tuple(loaded_weight.shape)} is nothing that vLLM's loader for "
                    f"{type(self.layer).__name__} takes as shard {loaded_shard_id!r}: {error}"
                ) from error
            arrived = self._arrived.setdefault(suffix, set())
            arrived.update(loaded_shard_id if isinstance(loaded_shard_id, tuple) else shard or (_WHOLE,))

        return load

    def check_complete(self, has_bias: bool) -> None:
        """Raises ValueError that names the tensors that never came."""
        needed = [suffix for suffix, kind in self.scheme.tensors if kind in ("codes", "scales", "global")]
        missing: list[str] = []
        for suffix in [*needed, _BIAS] if has_bias else needed:
            arrived = self._arrived.get(suffix, set())
            if len(self.shards) == 1 and not arrived:
                missing.append(suffix)
            elif len(self.shards) > 1 and _WHOLE not in arrived and len(arrived) < len(self.shards):
                known = {self._shard_name(shard) for shard in arrived}
                missing += [f"{shard}.{suffix}" for shard in self.shards if shard not in known]
        checks.check_nothing_missing(self.name, missing, "this linear")

    def _shard_name(self, shard: Any) -> str:
        index = {"q": 0, "k": 1, "v": 2}.get(shard) if isinstance(shard, str) else shard
        if isinstance(index, int) and 0 <= index < len(self.shards):
            return self.shards[index]
        return f"shard {shard}"

    def _where(self, suffix: str, shard: Any) -> str:
        return f"{self.name}: {suffix if shard is None else f'{self._shard_name(shard)}.{suffix}'}"

    def _checked(self, where: str, kind: TensorKind, tensor: Tensor, rows: int | None) -> Tensor:
        """The tensor as vLLM's loader is to copy it: raw bytes, or fp32 [1]; a bias stays what it is.

        rows: that a matrix or a bias must have, None where vLLM's loader alone knows.
        """
        fmt = self.scheme.weight_format
        if kind == "global":
            if tensor.numel() != 1:
                raise ValueError(f"{where} must be one value, found shape {tuple(tensor.shape)}")
            checks.check_dtype(where, kind, tensor, fmt)
            checks.global_factors(where, tensor, reciprocal=False)
            return tensor.detach().float().reshape(1)
        columns = () if kind == "bias" else (self.input_size // checks.per_element(kind, fmt),)
        # A loader of the layer's own may take any number of rows; then only vLLM's check of them is left.
        checks.check_shape(where, tensor, (tensor.shape[0] if rows is None and tensor.dim() else rows or 0, *columns))
        checks.check_dtype(where, kind, tensor, fmt)
        tensor = tensor.detach()
        if kind == "bias":
            checks.check_bias(where, tensor)
            return tensor
        tensor = tensor.contiguous()
        return fmt.raw_scales(where, tensor).view(self.scale_dtype) if kind == "scales" else tensor.view(torch.uint8)
