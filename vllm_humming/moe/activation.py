# SPDX-License-Identifier: Apache-2.0
"""Translates vLLM's MoE activation and its parameters to the op's arguments."""

import math
from typing import Any, NamedTuple

from torch import nn
from vllm.model_executor.layers.fused_moe import MoEActivation

from vllm_humming import compat
from vllm_humming.moe.reference import Activation


class ActivationSpec(NamedTuple):
    """The op's activation arguments; interleaved: w13's gate and up rows alternate in the checkpoint."""

    code: Activation
    alpha: float
    beta: float
    limit: float
    interleaved: bool


def activation_spec(layer: nn.Module, moe: Any, layer_name: str) -> ActivationSpec:
    """The layer's activation for the op.

    SwiGLU parameters come from the layer, then from the model's config; swigluoai (gpt-oss) has vLLM's alpha 1.702,
    beta 1, limit 7 where neither gives one. Raises ValueError for an unsupported activation or a missing parameter.
    """
    activation = moe.activation

    def parameter(name: str, default: float | None) -> float:
        for source in (layer, moe, compat.hf_text_config()):
            value = getattr(source, f"swiglu_{name}", None)
            if value is not None:
                return float(value)
        if default is None:
            raise ValueError(
                f"{layer_name}: activation {activation.value!r} needs swiglu_{name}, which neither the layer nor the "
                "model's config gives"
            )
        return default

    if activation is MoEActivation.SILU:
        limit = parameter("limit", math.inf)
        # A limit of 0 means none, as in vLLM's models and kernels.
        return ActivationSpec(Activation.SWIGLU, 1.0, 0.0, limit if limit > 0 else math.inf, False)
    if activation is MoEActivation.SWIGLUOAI:
        alpha, beta, limit = parameter("alpha", 1.702), parameter("beta", 1.0), parameter("limit", 7.0)
        return ActivationSpec(Activation.SWIGLU, alpha, beta, limit, True)
    if activation is MoEActivation.SWIGLUOAI_UNINTERLEAVE:
        alpha, beta, limit = parameter("alpha", None), parameter("beta", None), parameter("limit", None)
        return ActivationSpec(Activation.SWIGLU, alpha, beta, limit, False)
    if activation is MoEActivation.GELU_TANH:
        return ActivationSpec(Activation.GELU_TANH, 1.0, 0.0, math.inf, False)
    if activation is MoEActivation.RELU2_NO_MUL:
        return ActivationSpec(Activation.RELU2, 1.0, 0.0, math.inf, False)
    raise ValueError(
        f"{layer_name}: vllm-humming has no activation {activation.value!r}; it has silu, swigluoai, "
        "swigluoai_uninterleave, gelu_tanh and relu2_no_mul"
    )
