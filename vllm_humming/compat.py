# SPDX-License-Identifier: Apache-2.0
"""Everything that depends on vLLM's version (>=0.26,<0.34) or on where vLLM keeps something.

Import cost: only vllm.logger at import time; the rest is imported by the function that needs it, so that register()
stays light. The rest of the package gets at vLLM's internals through this module, apart from stable base classes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.logger import init_logger

# All-to-all backends that bring tokens to the experts, and those of them that lay tokens out by expert.
BATCHED_BACKENDS = ("deepep_low_latency", "nixl_ep")
MODULAR_BACKENDS = ("deepep_high_throughput", "deepep_v2", *BATCHED_BACKENDS)

SUPPORTED = ((0, 26), (0, 34))  # first supported, first unsupported


def logger(name: str) -> Any:
    """A logger (with vLLM's info_once) that vLLM's handlers serve: vLLM configures only loggers under "vllm."."""
    return init_logger(f"vllm.{name}")


def vllm_version() -> tuple[int, int] | None:
    """vLLM's (major, minor), or None for a build without a release number (a source checkout says "dev")."""
    import vllm

    parts = vllm.__version__.split(".")
    try:
        version = int(parts[0]), int(parts[1])
    except (IndexError, ValueError):
        return None
    return None if version == (0, 0) else version


def check_version() -> None:
    """Raises RuntimeError for a vLLM release outside the supported range."""
    found = vllm_version()
    first, end = SUPPORTED
    if found is not None and not first <= found < end:
        raise RuntimeError(
            f"vllm-humming supports vLLM >={first[0]}.{first[1]},<{end[0]}.{end[1]}, found {found[0]}.{found[1]}; "
            "install a supported vLLM"
        )


def register_quantization(name: str, config_class: type) -> None:
    """Registers config_class under name. Silent when that very class is registered already."""
    import vllm.model_executor.layers.quantization as quantization

    custom = getattr(quantization, "_CUSTOMIZED_METHOD_TO_QUANT_CONFIG", {})
    if custom.get(name) is not config_class:
        quantization.register_quantization_config(name)(config_class)


def base_config_class(name: str) -> type:
    """vLLM's own quantisation config class of that name."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    return get_quantization_config(name)


@dataclass(frozen=True)
class Platform:
    """What vLLM runs on. kind: "cuda", "cpu", "none" (no accelerator found) or another platform's name."""

    kind: str
    device_name: str = ""
    capability: tuple[int, int] | None = None


def platform() -> Platform:
    """The current platform. Reads the driver's records, initialises no CUDA context."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return Platform("cpu")
    if current_platform.is_unspecified():
        return Platform("none")
    if not current_platform.is_cuda():
        return Platform(str(current_platform.device_type or current_platform.device_name))
    capability = current_platform.get_device_capability()
    pair = None if capability is None else (int(capability.major), int(capability.minor))
    return Platform("cuda", str(current_platform.get_device_name()), pair)


def current_config() -> Any:
    """The VllmConfig under which a layer is being built (a default one outside an engine)."""
    from vllm.config import get_current_vllm_config

    return get_current_vllm_config()


def additional_config() -> Any:
    """`--additional-config` as it reached this process with the VllmConfig."""
    return getattr(current_config(), "additional_config", None) or {}


def uses_dummy_weights() -> bool:
    """Whether the engine runs with `--load-format dummy`."""
    return str(getattr(current_config().load_config, "load_format", "")) == "dummy"


def uses_elastic_ep() -> bool:
    """Whether ranks may join or leave the running engine."""
    return bool(getattr(current_config().parallel_config, "enable_elastic_ep", False))


def hf_text_config() -> Any:
    """The served model's text config, or None outside an engine."""
    model_config = getattr(current_config(), "model_config", None)
    return getattr(model_config, "hf_text_config", None)


def model_file(hf_config: Any, name: str) -> dict[str, Any] | None:
    """A JSON file beside the config.json that hf_config was read from, None where there is none."""
    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

    model = getattr(hf_config, "_name_or_path", None)
    content: dict[str, Any] | None = get_hf_file_to_dict(name, model, None) if model else None
    return content


def is_routed_experts(layer: torch.nn.Module) -> bool:
    """Whether layer is vLLM's holder of routed expert weights."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    return isinstance(layer, RoutedExperts)


def is_linear(layer: torch.nn.Module) -> bool:
    from vllm.model_executor.layers.linear import LinearBase

    return isinstance(layer, LinearBase)


def linear_checkpoint_rows(layer: torch.nn.Module, shard: Any) -> int | None:
    """Rows of the checkpoint's tensor that the weight loader of one of vLLM's linears is handed for a shard.

    shard: what models pass to it, None for a tensor of all rows. None for a class with rules of its own.
    """
    from vllm.model_executor.layers import linear

    loader = getattr(type(layer), "weight_loader_v2", None)
    if isinstance(layer, linear.QKVParallelLinear):
        if loader is not linear.QKVParallelLinear.weight_loader_v2:
            return None
        kv_heads = layer.total_num_kv_heads
        sizes = {
            "q": layer.total_num_heads * layer.head_size,
            "k": kv_heads * layer.head_size,
            "v": kv_heads * layer.v_head_size,
        }
        return int(sum(sizes.values()) if shard is None else sizes[shard])
    if isinstance(layer, linear.MergedColumnParallelLinear):
        if loader is not linear.MergedColumnParallelLinear.weight_loader_v2:
            return None
        shards = range(len(layer.output_sizes)) if shard is None else shard if isinstance(shard, tuple) else (shard,)
        return int(sum(layer.output_sizes[index] for index in shards))
    return int(layer.output_size) if shard is None else None  # type: ignore[arg-type]


def linear_shard_names(layer: torch.nn.Module, name: str, count: int) -> list[str]:
    """The checkpoint's names of the projections that a linear of `count` shards fuses, their numbers if unknown."""
    mapping = getattr(layer.quant_config, "packed_modules_mapping", None) or {}
    names = mapping.get(name.rsplit(".", 1)[-1], [])
    return list(names) if len(names) == count else [f"shard {index}" for index in range(count)]


def unquantized_linear_method() -> Any:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    return UnquantizedLinearMethod()


def moe_factory() -> Callable[..., torch.nn.Module]:
    """What models call to build a MoE layer: `FusedMoEFactory`, in older versions `FusedMoE`."""
    import vllm.model_executor.layers.fused_moe as fused_moe

    return getattr(fused_moe, "FusedMoEFactory", None) or fused_moe.FusedMoE


def expert_checkpoint_names(layer: torch.nn.Module) -> list[str]:
    """The checkpoint's module names of one expert's projections, e.g. gate_proj, up_proj, down_proj.

    A non-gated layer has no gate: 0.33 gives None for the missing name, earlier versions an empty string.
    """
    names = [getattr(layer, f"ckpt_{part}_proj_name", f"{part}_proj") for part in ("gate", "up", "down")]
    return [name for name in names if name]


def quark_excludes(config: Any, prefix: str, *, experts: bool = True) -> bool:
    """Whether a QuarkConfig leaves the experts under prefix, or a linear of that name, unquantised."""
    from vllm.model_executor.layers.quantization.quark.utils import should_ignore_layer

    excluded = config.quant_config.get("exclude") or []
    return bool(
        should_ignore_layer(
            prefix, ignore=excluded, fused_mapping=config.packed_modules_mapping, check_children=experts
        )
    )


def fp8_excludes(config: Any, prefix: str) -> bool:
    """Whether an Fp8Config leaves the layer under prefix unquantised."""
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

    return bool(
        is_layer_skipped(
            prefix=prefix, ignored_layers=config.ignored_layers, fused_mapping=config.packed_modules_mapping
        )
    )


def local_expert(layer: torch.nn.Module, expert: int) -> int:
    """The local slot of a global expert id, -1 when the expert lives on another rank."""
    return int(layer._map_global_expert_id_to_local_expert_id(expert))  # type: ignore[operator]


def replica_slots(layer: torch.nn.Module, expert: int) -> tuple[int, ...]:
    """The local slots of every copy of a checkpoint's expert, () when they all live on other ranks.

    Expert load balancing adds redundant copies; the ids of vLLM's layers are then those of physical experts, logical
    ones first, then the copies.
    """
    moe = layer.moe_config
    logical, physical = int(moe.num_logical_experts), int(moe.num_experts)  # type: ignore[union-attr, arg-type]
    slots = (local_expert(layer, copy) for copy in range(expert, physical, logical))
    return tuple(slot for slot in slots if slot >= 0)


def all2all_backend(parallel: Any) -> str | None:
    """The expert all-to-all backend in use, or None when tokens are not exchanged between ranks."""
    if getattr(parallel, "use_passthrough_all2all", False):  # 0.33 on: the experts would dispatch themselves
        return "passthrough"
    return str(parallel.all2all_backend) if parallel.use_all2all_kernels else None


def make_prepare_finalize(moe: Any, quant_config: Any, routing_tables: Any) -> Any:
    """vLLM's dispatch and combine of the configured all-to-all backend, one of MODULAR_BACKENDS."""
    from vllm.model_executor.layers.fused_moe import all2all_utils

    return all2all_utils.maybe_make_prepare_finalize(
        moe=moe,
        quant_config=quant_config,
        routing_tables=routing_tables,
        allow_new_interface=True,
        use_monolithic=False,
    )


def workspace(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Scratch shared by all layers; its size is locked after CUDA graph capture."""
    from vllm.v1.worker.workspace import current_workspace_manager

    scratch: torch.Tensor = current_workspace_manager().get_simultaneous((shape, dtype))[0]
    return scratch
