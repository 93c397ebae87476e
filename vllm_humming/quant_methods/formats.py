# SPDX-License-Identifier: Apache-2.0
"""The checkpoint formats the plugin loads: one CheckpointFormat each. A new format is one more entry of FORMATS."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from vllm_humming import compat

TensorKind = Literal["codes", "scales", "bias", "dense"]

logger = compat.logger(__name__)


@dataclass(frozen=True)
class ExpertScheme:
    """How a checkpoint stores its experts.

    weight_format: the kernels' weight format. tensors: parameter suffix (as vLLM's loaders spell it, so that w13_ and
    w2_ may be put before it) -> what that tensor holds. "dense" tensors are quantised while loading.
    """

    weight_format: Literal["mxfp4"]
    tensors: tuple[tuple[str, TensorKind], ...]


@dataclass(frozen=True)
class CheckpointFormat:
    """One kind of quantised checkpoint.

    key: identifier, part of the shadow class's name. label: name in messages. base: vLLM's quantisation method whose
    config class handles everything but the experts. matches(quantization_config): whether it describes this format.
    expert_scheme(config, layer, prefix): how the experts of one MoE layer are stored, None when vLLM's own method is to
    handle them (experts left unquantised); raises ValueError for experts stored in a way the plugin does not know.
    """

    key: str
    label: str
    base: str
    matches: Callable[[dict[str, Any]], bool]
    expert_scheme: Callable[[Any, torch.nn.Module, str], ExpertScheme | None]


def resolve(quantization_config: dict[str, Any]) -> CheckpointFormat:
    """The format of a checkpoint's quantization_config; ValueError names an unknown one and what is supported."""
    for candidate in FORMATS:
        if candidate.matches(quantization_config):
            return candidate
    supported = "; ".join(candidate.label for candidate in FORMATS)
    raise ValueError(
        f"vllm-humming does not load checkpoints of format {describe(quantization_config)}. "
        f"Supported: {supported}; unquantised BF16/FP16 checkpoints (quantised while loading). "
        "Leave out --quantization humming to use vLLM's own method"
    )


def describe(quantization_config: dict[str, Any]) -> str:
    """Names a quantization_config by its method and its format, algorithm or groups."""
    parts = [f"quant_method={quantization_config.get('quant_method')!r}"]
    parts += [f"{key}={quantization_config[key]!r}" for key in ("format", "quant_algo") if key in quantization_config]
    groups = quantization_config.get("config_groups")
    if isinstance(groups, dict):
        weights = [_weights_of(group) for group in groups.values()]
        bits = sorted({f"{w.get('num_bits')}-bit {w.get('type')} group {w.get('group_size')}" for w in weights})
        parts.append(f"weights={', '.join(bits)}")
    return " ".join(parts)


def _weights_of(group: Any) -> dict[str, Any]:
    return (group.get("weights") or {}) if isinstance(group, dict) else {}


# compressed-tensors, mxfp4-pack-quantized

_CT_FORMAT = "mxfp4-pack-quantized"
_CT_SCHEME = ExpertScheme("mxfp4", (("weight_packed", "codes"), ("weight_scale", "scales"), ("bias", "bias")))


def _ct_matches(config: dict[str, Any]) -> bool:
    if config.get("quant_method") != "compressed-tensors":
        return False
    groups = config.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, dict) else []
    return any(
        (group.get("format") or config.get("format")) == _CT_FORMAT and _is_mxfp4(_weights_of(group))
        for group in groups
        if isinstance(group, dict)
    )


def _is_mxfp4(weights: dict[str, Any]) -> bool:
    return weights.get("num_bits") == 4 and weights.get("type") == "float" and weights.get("group_size") == 32


def _ct_expert_scheme(config: Any, layer: torch.nn.Module, prefix: str) -> ExpertScheme | None:
    # A group that targets "Linear" means the experts' linears too, which vLLM has fused into one layer.
    config._add_fused_moe_to_target_scheme_map()
    names = [f"{prefix}.0.{name}" for name in compat.expert_checkpoint_names(layer)]
    schemes = [config.get_scheme_dict(layer, name) for name in names]
    if any(scheme != schemes[0] for scheme in schemes):
        raise ValueError(f"{prefix}: the projections of one MoE layer must share one scheme, found {schemes}")
    scheme = schemes[0]
    if scheme is None:
        return None
    weights = scheme.get("weights")
    found = {name: getattr(weights, name, None) for name in ("num_bits", "type", "group_size", "strategy")}
    found = {name: getattr(value, "value", value) for name, value in found.items()}
    if scheme.get("format") != _CT_FORMAT or not _is_mxfp4(found):
        raise ValueError(
            f"{prefix}: vllm-humming loads compressed-tensors experts of format {_CT_FORMAT} (4-bit float, group 32), "
            f"found format {scheme.get('format')!r} with {found}"
        )
    if scheme.get("input_activations") is not None:
        logger.info_once("MXFP4 experts run with 16-bit activations; the checkpoint's activation scheme is not used")
    return _CT_SCHEME


# gpt-oss, mxfp4

_BLOCKS_SCHEME = ExpertScheme("mxfp4", (("weight", "codes"), ("weight_scale", "scales"), ("bias", "bias")))


def _gpt_oss_matches(config: dict[str, Any]) -> bool:
    # vLLM renames "mxfp4" to "gpt_oss_mxfp4" once it has seen that the model is gpt-oss.
    return config.get("quant_method") == "gpt_oss_mxfp4"


def _gpt_oss_expert_scheme(config: Any, layer: torch.nn.Module, prefix: str) -> ExpertScheme:
    return _BLOCKS_SCHEME


FORMATS = (
    CheckpointFormat(
        "compressed_tensors_mxfp4",
        f"compressed-tensors {_CT_FORMAT}",
        "compressed-tensors",
        _ct_matches,
        _ct_expert_scheme,
    ),
    CheckpointFormat("gpt_oss_mxfp4", "gpt-oss mxfp4", "gpt_oss_mxfp4", _gpt_oss_matches, _gpt_oss_expert_scheme),
)

# Unquantised experts, by the option online_format.
ONLINE = {"mxfp4": ExpertScheme("mxfp4", (("weight", "dense"), ("bias", "bias")))}
