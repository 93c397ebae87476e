# SPDX-License-Identifier: Apache-2.0
"""Builds real vLLM MoE layers of the plugin on a machine without a GPU, and checkpoint tensors for them."""

import contextlib
import copy
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_humming.moe.weight_formats import MXFP4, NVFP4, WeightFormat

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

CT_WEIGHTS = {
    "num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False,
    "scale_dtype": "torch.uint8", "zp_dtype": None, "actorder": None, "block_structure": None, "observer": None,
    "observer_kwargs": {},
}  # fmt: skip
CT_MXFP4: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "format": "mxfp4-pack-quantized",
            "weights": CT_WEIGHTS,
            "input_activations": None,
            "output_activations": None,
        }
    },
}
CT_NVFP4: dict[str, Any] = CT_MXFP4 | {
    "format": "nvfp4-pack-quantized",
    "config_groups": {
        "group_0": CT_MXFP4["config_groups"]["group_0"]
        | {"format": "nvfp4-pack-quantized", "weights": CT_WEIGHTS | {"group_size": 16, "strategy": "tensor_group"}}
    },
}
MODELOPT: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*self_attn*"]}
MODELOPT_OLD: dict[str, Any] = {
    "producer": {"name": "modelopt", "version": "0.29.0"},
    "quantization": {
        "quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["lm_head"],
    },
    "quant_method": "modelopt_fp4",  # vLLM puts it there
}  # fmt: skip
MODELOPT_MIXED: dict[str, Any] = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        "model.layers.0.mlp.experts.0.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.1.mlp.experts.0.up_proj": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        "model.layers.2.mlp.experts.0.up_proj": {"quant_algo": "FP8"},
    },
    "ignore": ["lm_head", "model.layers.3*"],
}
QUARK: dict[str, Any] = {
    "quant_method": "quark",
    "global_quant_config": {
        "weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"},
        "input_tensors": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "is_dynamic": True},
    },
    "layer_quant_config": {},
    "layer_type_quant_config": {},
    "exclude": ["lm_head"],
    "export": {"kv_cache_group": [], "pack_method": "reorder"},
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "quant_method": "deepseek_v4_fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "ignored_layers": [],
}
GPT_OSS: dict[str, Any] = {"quant_method": "gpt_oss_mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def engine_config(
    *, additional: dict[str, Any] | None = None, load_format: str = "auto", eplb: bool = False, **parallel: Any
) -> Any:
    from vllm.config import DeviceConfig, LoadConfig, ParallelConfig, VllmConfig

    config = VllmConfig(
        device_config=DeviceConfig(device="cpu"),
        load_config=LoadConfig(load_format=load_format),
        parallel_config=ParallelConfig(**parallel),
        additional_config=additional or {},
    )
    # Afterwards, because vLLM's check allows expert load balancing on GPUs only.
    config.parallel_config.enable_eplb = eplb
    return config


@contextlib.contextmanager
def engine(**kwargs: Any) -> Iterator[Any]:
    """A current VllmConfig and vLLM's parallel groups, of one rank where there are none yet."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel, model_parallel_is_initialized

    config = engine_config(**kwargs)
    with set_current_vllm_config(config):
        if not model_parallel_is_initialized():
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            init_distributed_environment(
                1, 0, local_rank=0, backend="gloo", distributed_init_method=f"tcp://127.0.0.1:{port}"
            )
            initialize_model_parallel(1, 1)
        yield config


def quant_config(checkpoint: dict[str, Any] | None) -> Any:
    """The config that `--quantization humming` gives for a checkpoint's quantization_config (None: unquantised)."""
    from vllm_humming.quant_methods.config import HummingConfig

    return HummingConfig() if checkpoint is None else HummingConfig.from_config(copy.deepcopy(checkpoint))


@dataclass
class Sizes:
    experts: int = 4
    top_k: int = 2
    hidden: int = 96
    intermediate: int = 160
    extra: dict[str, Any] = field(default_factory=dict)


def build(
    checkpoint: dict[str, Any] | None, sizes: Sizes, name: str = "model.layers.0.mlp.experts", **kwargs: Any
) -> Any:
    """The RoutedExperts of a MoE layer that a model would build; call it under engine()."""
    from vllm_humming import compat

    dtype = kwargs.pop("dtype", torch.bfloat16)
    if str(kwargs.get("activation", "")).endswith("_no_mul"):
        kwargs["ckpt_names"] = ("up_proj", "down_proj", None)  # as Nemotron-H, which has no gate
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # as vLLM's loader does around the model's constructor
    try:
        with non_gated_layers_allowed():
            layer = compat.moe_factory()(
                num_experts=sizes.experts,
                top_k=sizes.top_k,
                hidden_size=sizes.hidden,
                intermediate_size=sizes.intermediate,
                params_dtype=dtype,
                renormalize=True,
                quant_config=quant_config(checkpoint),
                prefix=name,
                **kwargs,
            )
    finally:
        torch.set_default_dtype(default)
    return layer.routed_experts


@contextlib.contextmanager
def non_gated_layers_allowed() -> Iterator[None]:
    """vLLM builds non-gated layers on GPUs only; this tells its config check, and nothing else, that here is one."""
    import vllm.model_executor.layers.fused_moe.config as moe_config

    class Gpu:
        def is_cuda_alike(self) -> bool:
            return True

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    real = moe_config.current_platform
    moe_config.current_platform = Gpu()
    try:
        yield
    finally:
        moe_config.current_platform = real


def runs_block_fp8_linears() -> bool:
    """Whether vLLM itself has a kernel for block-FP8 linears on this machine: on CPUs it takes AMX."""
    from vllm.platforms import current_platform

    return current_platform.is_cuda() or (current_platform.is_cpu() and torch.cpu._is_amx_tile_supported())


class Experts:
    """Random experts: w13 [E, R, H] (rows gate then up, or interleaved), w2 [E, H, I], with optional biases.

    NVFP4 experts have a global scale of their own each, and the up half one twice as large as the gate's.
    """

    def __init__(
        self, sizes: Sizes, *, gated: bool = True, bias: bool = False, seed: int = 0, fmt: WeightFormat = MXFP4
    ) -> None:
        gen = torch.Generator().manual_seed(seed)
        e, h, i = sizes.experts, sizes.hidden, sizes.intermediate
        rows = 2 * i if gated else i
        self.format = fmt

        def byte(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, high, shape, generator=gen, dtype=torch.uint8)

        self.codes = {"w13": byte(0, 256, e, rows, h // 2), "w2": byte(0, 256, e, h, i // 2)}
        low, high = (0, 0x48) if fmt is NVFP4 else (120, 125)  # NVFP4: zero, subnormal and normal numbers up to 4
        group = fmt.group_k
        self.scales = {"w13": byte(low, high, e, rows, h // group), "w2": byte(low, high, e, h, i // group)}
        self.globals: dict[str, torch.Tensor] = {}
        if fmt.has_global:
            exponents = torch.arange(e, dtype=torch.float32)[:, None] % 3 - 6
            self.globals["w13"] = torch.exp2(exponents + (torch.arange(2) if gated else 0))
            self.globals["w2"] = torch.exp2(exponents - 1)
        self.bias: dict[str, torch.Tensor] = {}
        if bias:
            self.bias["w13"] = torch.randn(e, rows, generator=gen).bfloat16()
            self.bias["w2"] = torch.randn(e, h, generator=gen).bfloat16()

    def dense(self, projection: str) -> torch.Tensor:
        """float64 weights of all experts in checkpoint row order (NVFP4: not interleaved)."""
        from vllm_humming.moe.quantize import dequantize_mxfp4, dequantize_nvfp4

        pairs = zip(self.codes[projection], self.scales[projection], strict=True)
        if not self.globals:
            return torch.stack([dequantize_mxfp4(codes, scales, torch.float64) for codes, scales in pairs])
        rows = self.codes[projection].shape[1]
        factors = self.globals[projection].repeat_interleave(rows // self.globals[projection].shape[1], 1)
        weights = [dequantize_nvfp4(*pair, own, torch.float64) for pair, own in zip(pairs, factors, strict=True)]
        return torch.stack(weights)

    def tensor(self, kind: str, projection: str, expert: int, shard: str, *, reciprocal: bool = False) -> Any:
        """The checkpoint tensor of one shard, None for what these experts do not have."""
        half = 1 if shard == "w3" else 0
        if kind == "global":
            value = self.globals[projection][expert, min(half, self.globals[projection].shape[1] - 1)]
            return value.reciprocal() if reciprocal else value
        if kind == "unused":
            return torch.tensor(float("nan"))  # never looked at
        source = {"codes": self.codes, "scales": self.scales, "bias": self.bias}[kind]
        if not source:
            return None
        tensor = source[projection][expert]
        split = projection == "w13" and self.codes["w13"].shape[1] == 2 * self.codes["w2"].shape[2] * 2
        return tensor.chunk(2)[half] if split else tensor


def load_one(layer: Any, name: str, tensor: torch.Tensor, shard: str | None, expert: int | None) -> Any:
    """Hands one checkpoint tensor to a layer's parameter in the way vLLM's models do."""
    param = getattr(layer, name)
    return param.weight_loader(
        param, tensor, f"{layer.layer_name}.{name}", shard_id=shard, expert_id=expert, return_success=True
    )


def load_split(layer: Any, experts: Experts, *, skip: tuple[str, ...] = ()) -> None:
    """Loads expert by expert, gate, up and down apart, as most checkpoints come, under the names of the scheme."""
    gated, scheme = layer.activation.is_gated, layer.quant_method.scheme
    for e in range(experts.codes["w13"].shape[0]):
        for shard, projection in (("w1", "w13"), ("w2", "w2"), ("w3", "w13")):
            if shard == "w3" and not gated:
                continue
            for suffix, kind in scheme.tensors:
                tensor = experts.tensor(kind, projection, e, shard, reciprocal=scheme.reciprocal_global)
                if tensor is not None and f"{e}.{shard}.{suffix}" not in skip:
                    load_one(layer, f"{projection}_{suffix}", tensor, shard, e)


def load_stacked(layer: Any, experts: Experts) -> None:
    """Loads all experts of a tensor at once, as gpt-oss checkpoints come."""
    for projection in ("w13", "w2"):
        for suffix, source in (("weight", experts.codes), ("weight_scale", experts.scales), ("bias", experts.bias)):
            if source:
                load_one(layer, f"{projection}_{suffix}", source[projection], None, None)


def finish(layer: Any) -> None:
    layer.quant_method.process_weights_after_loading(layer)


def routing(tokens: int, sizes: Sizes, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [M, H] bf16, weights [M, k] fp32 and distinct ids [M, k] int32."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, sizes.hidden, generator=gen).bfloat16()
    logits = torch.randn(tokens, sizes.experts, generator=gen)
    weights, ids = logits.softmax(-1).topk(sizes.top_k, -1)
    return x, (weights / weights.sum(-1, keepdim=True)).contiguous(), ids.int().contiguous()


def apply(layer: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return layer.quant_method.apply(layer, x, weights, ids, None, None)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())
