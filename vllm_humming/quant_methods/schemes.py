# SPDX-License-Identifier: Apache-2.0
"""How checkpoints store the experts of one MoE layer, or a linear: which tensors there are and what each holds."""

from dataclasses import dataclass, replace
from typing import Literal

from vllm_humming.moe.weight_formats import FOR_FP8, MXFP4, NVFP4, WeightFormat

# global: one fp32 value an expert and projection, or a linear. dense: quantised while loading. unused: read and
# dropped (the scales of activations, which stay 16 bits wide or get scales of their own).
TensorKind = Literal["codes", "scales", "global", "bias", "dense", "unused"]


@dataclass(frozen=True)
class ExpertScheme:
    """How a checkpoint stores its experts, or a linear of the same format.

    tensors: parameter suffix (as vLLM's loaders spell it, so that w13_ and w2_ may be put before it) -> what that
    tensor holds. reciprocal_global: a weight is code * scale / global, not code * scale * global. activation: what its
    activations are to be, None for FP8 of a kind that is not here. stated: the checkpoint's own words for that.
    """

    weight_format: WeightFormat
    tensors: tuple[tuple[str, TensorKind], ...]
    reciprocal_global: bool = False
    activation: Literal["16bit", "fp8"] | None = "16bit"
    stated: str = ""

    def with_activation(self, activation: Literal["16bit", "fp8"] | None, stated: str) -> "ExpertScheme":
        return replace(self, activation=activation, stated=stated)

    def packed_format(self, activation: str, where: str) -> WeightFormat:
        """The format that the experts are packed in under the option `activation`.

        Raises ValueError, its message started by where, for activations that these weights do not run with.
        """
        chosen = self.activation if activation == "auto" else activation
        if chosen is None:
            raise ValueError(
                f"{where}: the checkpoint wants FP8 activations with {self.stated}; vllm-humming has dynamic e4m3 with "
                f"a scale a token and 128 channels. Set the option activation to 'fp8' for these or to '16bit'"
            )
        if chosen == "16bit":
            return self.weight_format
        if self.weight_format not in FOR_FP8:
            known = " or ".join(fmt.label for fmt in FOR_FP8)
            online = any(kind == "dense" for _, kind in self.tensors)
            other = f", or online_format to {' or '.join(repr(fmt.name) for fmt in FOR_FP8)}" if online else ""
            raise ValueError(
                f"{where}: FP8 activations need {known} weights, found {self.weight_format.label}; set the option "
                f"activation to '16bit'{other}"
            )
        return FOR_FP8[self.weight_format]


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
