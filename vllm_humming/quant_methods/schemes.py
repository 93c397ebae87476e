# SPDX-License-Identifier: Apache-2.0
"""How checkpoints store the experts of one MoE layer: which tensors there are and what each holds."""

from dataclasses import dataclass
from typing import Literal

from vllm_humming.moe.weight_formats import MXFP4, NVFP4, WeightFormat

# global: one fp32 value an expert and projection. dense: quantised while loading. unused: read and dropped (the scales
# of activations, which stay 16 bits wide here).
TensorKind = Literal["codes", "scales", "global", "bias", "dense", "unused"]


@dataclass(frozen=True)
class ExpertScheme:
    """How a checkpoint stores its experts.

    tensors: parameter suffix (as vLLM's loaders spell it, so that w13_ and w2_ may be put before it) -> what that
    tensor holds. reciprocal_global: a weight is code * scale / global, not code * scale * global.
    """

    weight_format: WeightFormat
    tensors: tuple[tuple[str, TensorKind], ...]
    reciprocal_global: bool = False


_BIAS: tuple[str, TensorKind] = ("bias", "bias")

CT_MXFP4 = ExpertScheme(MXFP4, (("weight_packed", "codes"), ("weight_scale", "scales"), _BIAS))
CT_NVFP4 = ExpertScheme(
    NVFP4,
    (
        ("weight_packed", "codes"),
        ("weight_scale", "scales"),
        ("weight_global_scale", "global"),
        ("input_global_scale", "unused"),
        _BIAS,
    ),
    reciprocal_global=True,
)
MODELOPT_NVFP4 = ExpertScheme(
    NVFP4,
    (
        ("weight", "codes"),
        ("weight_scale", "scales"),
        ("weight_scale_2", "global"),
        ("input_scale", "unused"),
        _BIAS,
    ),
)
QUARK_MXFP4 = ExpertScheme(MXFP4, (("weight", "codes"), ("weight_scale", "scales"), ("input_scale", "unused"), _BIAS))
# gpt-oss and DeepSeek-V4
PLAIN_MXFP4 = ExpertScheme(MXFP4, (("weight", "codes"), ("weight_scale", "scales"), _BIAS))

# Unquantised experts, by the option online_format.
ONLINE = {fmt.name: ExpertScheme(fmt, (("weight", "dense"), _BIAS)) for fmt in (MXFP4, NVFP4)}
