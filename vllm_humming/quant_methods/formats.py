# SPDX-License-Identifier: Apache-2.0
"""The checkpoint formats the plugin loads: one CheckpointFormat each. A new format is one more entry of FORMATS."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vllm_humming import compat
from vllm_humming.moe.fp8 import BLOCK_K as FP8_BLOCK
from vllm_humming.quant_methods import schemes
from vllm_humming.quant_methods.schemes import ExpertScheme


def _no_fp4_linears(config: Any, layer: torch.nn.Module, prefix: str) -> None:
    return None


@dataclass(frozen=True)
class CheckpointFormat:
    """One kind of quantised checkpoint.

    key: identifier, part of the shadow class's name. label: name in messages. base: vLLM's quantisation method whose
    config class handles everything but the experts. matches(quantization_config): whether it describes this format.
    expert_scheme(config, layer, prefix): how the experts of one MoE layer are stored, None when vLLM's own method is to
    handle them (experts not stored as FP4); raises ValueError for FP4 experts stored in a way the plugin does not know.
    linear_scheme: the same for one linear; None for every linear that is stored otherwise or not quantised.
    """

    key: str
    label: str
    base: str
    matches: Callable[[dict[str, Any]], bool]
    expert_scheme: Callable[[Any, torch.nn.Module, str], ExpertScheme | None]
    linear_scheme: Callable[[Any, torch.nn.Module, str], ExpertScheme | None] = _no_fp4_linears


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
    if "format" in quantization_config:
        parts.append(f"format={quantization_config['format']!r}")
    if algorithm := _modelopt_algorithm(quantization_config):
        parts.append(f"quant_algo={algorithm!r}")
    groups = quantization_config.get("config_groups")
    if isinstance(groups, dict):
        weights = [_weights_of(group) for group in groups.values()]
        bits = sorted({f"{w.get('num_bits')}-bit {w.get('type')} group {w.get('group_size')}" for w in weights})
        parts.append(f"weights={', '.join(bits)}")
    return " ".join(parts)


# compressed-tensors

# format -> (group size, scheme)
_CT_FORMATS = {
    "mxfp4-pack-quantized": (32, schemes.CT_MXFP4),
    "nvfp4-pack-quantized": (16, schemes.CT_NVFP4),
}


def _weights_of(group: Any) -> dict[str, Any]:
    return (group.get("weights") or {}) if isinstance(group, dict) else {}


def _ct_scheme(name: Any, weights: dict[str, Any]) -> ExpertScheme | None:
    group_size, scheme = _CT_FORMATS.get(name, (None, None))
    fits = weights.get("num_bits") == 4 and weights.get("type") == "float" and weights.get("group_size") == group_size
    return scheme if fits else None


def _ct_matches(config: dict[str, Any]) -> bool:
    groups = config.get("config_groups")
    if config.get("quant_method") != "compressed-tensors" or not isinstance(groups, dict):
        return False
    groups_of_ours = [
        group
        for group in groups.values()
        if isinstance(group, dict) and _ct_scheme(group.get("format") or config.get("format"), _weights_of(group))
    ]
    return bool(groups_of_ours)


def _ct_expert_scheme(config: Any, layer: torch.nn.Module, prefix: str) -> ExpertScheme | None:
    # A group that targets "Linear" means the experts' linears too, which vLLM has fused into one layer.
    config._add_fused_moe_to_target_scheme_map()
    names = [f"{prefix}.0.{name}" for name in compat.expert_checkpoint_names(layer)]
    found = [config.get_scheme_dict(layer, name) for name in names]
    if any(scheme != found[0] for scheme in found):
        raise ValueError(f"{prefix}: the projections of one MoE layer must share one scheme, found {found}")
    if found[0] is None:
        return None
    weights = _plain(found[0].get("weights"), "num_bits", "type", "group_size", "strategy")
    scheme = _ct_scheme(found[0].get("format"), weights)
    if scheme is None:
        known = ", ".join(f"{name} (4-bit float, group {size})" for name, (size, _) in _CT_FORMATS.items())
        raise ValueError(
            f"{prefix}: vllm-humming loads compressed-tensors experts of format {known}, "
            f"found format {found[0].get('format')!r} with {weights}"
        )
    return _ct_with_activation(scheme, found[0].get("input_activations"))


def _ct_linear_scheme(config: Any, layer: torch.nn.Module, prefix: str) -> ExpertScheme | None:
    if getattr(config, "transform_config", None):  # vLLM rotates inputs and outputs of such linears
        return None
    found = config.get_scheme_dict(layer, prefix)
    if found is None:
        return None
    weights = _plain(found.get("weights"), "num_bits", "type", "group_size")
    scheme = _ct_scheme(found.get("format"), weights)
    return None if scheme is None else _ct_with_activation(scheme, found.get("input_activations"))


def _plain(arguments: Any, *names: str) -> dict[str, Any]:
    """Fields of compressed-tensors' QuantizationArgs, enumerations as their strings."""
    values = {name: getattr(arguments, name, None) for name in names}
    return {name: getattr(value, "value", value) for name, value in values.items()}


def _ct_with_activation(scheme: ExpertScheme, arguments: Any) -> ExpertScheme:
    if arguments is None:
        return scheme
    found = _plain(arguments, "num_bits", "type", "strategy", "group_size", "dynamic")
    stated = ", ".join(f"{name} {value}" for name, value in found.items() if value is not None)
    if (found["num_bits"], found["type"], found["dynamic"]) != (8, "float", True):
        return scheme.with_activation("16bit", stated)
    ours = (found["strategy"], found["group_size"]) == ("group", FP8_BLOCK)
    return scheme.with_activation("fp8" if ours else None, stated)


# ModelOpt: new style (config.json: {"quant_method": "modelopt", "quant_algo": ...}) and old style
# (hf_quant_config.json: {"producer": ..., "quantization": {"quant_algo": ...}}, whose quant_method vLLM fills in)

_MODELOPT_NVFP4 = ("NVFP4", "W4A16_NVFP4")
_MODELOPT_GROUP = 16


def _modelopt_algorithm(config: dict[str, Any]) -> str:
    nested = config.get("quantization")
    algorithm = (nested if isinstance(nested, dict) else config).get("quant_algo")
    return str(algorithm or "").upper()


def _is_modelopt(config: dict[str, Any]) -> bool:
    return str(config.get("quant_method") or "").lower().startswith("modelopt")


def _modelopt_matches(config: dict[str, Any]) -> bool:
    return _is_modelopt(config) and _modelopt_algorithm(config) in _MODELOPT_NVFP4


def _modelopt_mixed_matches(config: dict[str, Any]) -> bool:
    return _is_modelopt(config) and _modelopt_algorithm(config) == "MIXED_PRECISION"


def complete_mixed_precision(hf_config: Any) -> None:
    """Puts the layers' algorithms of a mixed-precision checkpoint into hf_config's quantization_config.

    Older ones keep them in hf_quant_config.json alone; vLLM reads that for its own method names only.
    """
    config = getattr(hf_config, "quantization_config", None)
    if not isinstance(config, dict) or not _modelopt_mixed_matches(config):
        return
    nested = config.get("quantization")
    target = nested if isinstance(nested, dict) else config
    if not target.get("quantized_layers"):
        beside = (compat.model_file(hf_config, "hf_quant_config.json") or {}).get("quantization") or {}
        target["quantized_layers"] = beside.get("quantized_layers") or {}
        if target is config:
            config.setdefault("ignore", beside.get("exclude_modules") or [])


def _modelopt_scheme(group_size: Any, algorithm: Any, prefix: str) -> ExpertScheme:
    if group_size != _MODELOPT_GROUP:
        raise ValueError(f"{prefix}: NVFP4 has groups of {_MODELOPT_GROUP}, found group_size {group_size}")
    return schemes.MODELOPT_NVFP4.with_activation("16bit", "NVFP4" if algorithm == "NVFP4" else "")


def _modelopt_expert_scheme(config: Any, layer: torch.nn.Module, prefix: str) -> ExpertScheme | None:
    if config.is_layer_excluded(prefix):
        return None
    return _modelopt_scheme(config.group_size, getattr(config, "quant_method", "NVFP4"), prefix)


def _modelopt_linear_scheme(config: Any, layer: torch.nn.Module, prefix: str) -> ExpertScheme | None:
    # Older checkpoints do not list their vision towers as excluded; vLLM knows them by name.
    if any(name in prefix for name in ("vision_tower", "vision_model", "vit_large_projector")):
        return None
    return _modelopt_expert_scheme(config, layer, prefix)


def _modelopt_mixed_scheme(config: Any, layer: torch.nn.Module, prefix: str) -> ExpertScheme | None:
    """Of experts and of linears."""
    if config.is_layer_excluded(prefix):
        return None
    algorithm = config._resolve_quant_algo(prefix)
    if algorithm not in _MODELOPT_NVFP4:  # not quantised, or FP8: each layer has its own algorithm here
        return None
    return _modelopt_scheme(config.nvfp4_config.group_size, algorithm, prefix)


# Quark

_QUARK_MXFP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}


def _quark_entry(group: Any, name: str) -> Any:
    """An entry of a Quark layer config; a list of one is that one."""
    entry = group.get(name) if isinstance(group, dict) else None
    return entry[0] if isinstance(entry, list) and len(entry) == 1 else entry


def _is_quark_mxfp4(weight: Any) -> bool:
    return isinstance(weight, dict) and all(weight.get(key) == value for key, value in _QUARK_MXFP4.items())


def _quark_matches(config: dict[str, Any]) -> bool:
    layers = config.get("layer_quant_config")
    groups = [config.get("global_quant_config"), *(layers.values() if isinstance(layers, dict) else ())]
    return config.get("quant_method") == "quark" and any(
        _is_quark_mxfp4(_quark_entry(group, "weight")) for group in groups
    )


def _quark_expert_scheme(config: Any, layer: torch.nn.Module, prefix: str) -> ExpertScheme | None:
    if compat.quark_excludes(config, prefix):
        return None
    group = config._find_matched_config(prefix, layer)
    weight = _quark_entry(group, "weight")
    if not _is_quark_mxfp4(weight):
        raise ValueError(f"{prefix}: vllm-humming loads Quark experts whose weight is {_QUARK_MXFP4}, found {weight}")
    return _quark_with_activation(schemes.QUARK_MXFP4, _quark_entry(group, "input_tensors"))


def _quark_linear_scheme(config: Any, layer: torch.nn.Module, prefix: str) -> ExpertScheme | None:
    if compat.quark_excludes(config, prefix, experts=False):
        return None
    group = config._find_matched_config(prefix, layer)
    if not _is_quark_mxfp4(_quark_entry(group, "weight")):
        return None
    return _quark_with_activation(schemes.QUARK_MXFP4, _quark_entry(group, "input_tensors"))


def _quark_with_activation(scheme: ExpertScheme, entry: Any) -> ExpertScheme:
    if not isinstance(entry, dict):
        return scheme.with_activation("16bit", str(entry or ""))
    names = ("dtype", "qscheme", "group_size", "is_dynamic")
    stated = ", ".join(f"{name} {entry[name]}" for name in names if entry.get(name) is not None)
    if entry.get("dtype") != "fp8_e4m3" or not entry.get("is_dynamic"):
        return scheme.with_activation("16bit", stated)
    # A scale over more than 128 channels is nothing that the weights were made for (vLLM does not look at the qscheme
    # of dynamic FP8 inputs either); one over 32 is MXFP8.
    ours = entry.get("qscheme") != "per_group" or entry.get("group_size") == FP8_BLOCK
    return scheme.with_activation("fp8" if ours else None, stated)


# gpt-oss, mxfp4


def _gpt_oss_matches(config: dict[str, Any]) -> bool:
    # vLLM renames "mxfp4" to "gpt_oss_mxfp4" once it has seen that the model is gpt-oss.
    return config.get("quant_method") == "gpt_oss_mxfp4"


def _gpt_oss_expert_scheme(config: Any, layer: torch.nn.Module, prefix: str) -> ExpertScheme:
    return schemes.PLAIN_MXFP4


# DeepSeek-V4: block-FP8 linears, which stay vLLM's, with FP4 experts


def _deepseek_matches(config: dict[str, Any]) -> bool:
    # vLLM renames "fp8" to "deepseek_v4_fp8" once it has seen that the model is DeepSeek-V4.
    return config.get("quant_method") == "deepseek_v4_fp8"


def _deepseek_expert_scheme(config: Any, layer: torch.nn.Module, prefix: str) -> ExpertScheme | None:
    if compat.fp8_excludes(config, prefix):
        return None
    found = {"expert_dtype": config.expert_dtype, "moe_quant_algo": getattr(config, "moe_quant_algo", "")}
    if found != {"expert_dtype": "fp4", "moe_quant_algo": ""}:
        raise ValueError(
            f"{prefix}: vllm-humming loads DeepSeek-V4 experts of expert_dtype 'fp4' (MXFP4), found {found}; leave out "
            "--quantization humming to use vLLM's own method"
        )
    return schemes.PLAIN_MXFP4


FORMATS = (
    CheckpointFormat(
        "compressed_tensors",
        f"compressed-tensors {' and '.join(_CT_FORMATS)}",
        "compressed-tensors",
        _ct_matches,
        _ct_expert_scheme,
        _ct_linear_scheme,
    ),
    CheckpointFormat(
        "modelopt_fp4",
        "ModelOpt NVFP4",
        "modelopt_fp4",
        _modelopt_matches,
        _modelopt_expert_scheme,
        _modelopt_linear_scheme,
    ),
    CheckpointFormat(
        "modelopt_mixed",
        "ModelOpt mixed precision",
        "modelopt_mixed",
        _modelopt_mixed_matches,
        _modelopt_mixed_scheme,
        _modelopt_mixed_scheme,
    ),
    CheckpointFormat("quark", "Quark MXFP4", "quark", _quark_matches, _quark_expert_scheme, _quark_linear_scheme),
    CheckpointFormat("gpt_oss_mxfp4", "gpt-oss mxfp4", "gpt_oss_mxfp4", _gpt_oss_matches, _gpt_oss_expert_scheme),
    CheckpointFormat(
        "deepseek_v4_fp8",
        "DeepSeek-V4 FP8 with FP4 experts",
        "deepseek_v4_fp8",
        _deepseek_matches,
        _deepseek_expert_scheme,
    ),
)
