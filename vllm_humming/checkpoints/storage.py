# SPDX-License-Identifier: Apache-2.0
"""How published checkpoints store their experts: tensor names, dtypes, and what their configs say.

A Storage turns one expert projection into checkpoint tensors and the dense weight they stand for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vllm_humming.moe.quantize import Quantized, dequantize, quantize
from vllm_humming.moe.weight_formats import MXFP4, NVFP4, WeightFormat

Tensors = dict[str, Tensor]

INPUT_SCALE = 0.0078125  # of activations in W4A4 checkpoints; experts run with 16-bit ones
FP8_BLOCK = 128


@dataclass(frozen=True)
class Storage:
    """One way to store experts.

    weight_format: None for a BF16 checkpoint. tensors(weight [N, K]): suffix -> tensor, and the dense weight.
    config(layers, modules): quantization_config, where modules name the linears and routers of the model that are not
    quantised. in_config: whether that lies in config.json; otherwise in hf_quant_config.json. fused: one 3-D tensor
    over all experts, gate and up joined. linears: as tensors, for attention's projections; None: those are BF16.
    """

    weight_format: WeightFormat | None
    tensors: Callable[[Tensor | Drawn], tuple[Tensors, Tensor]]
    config: Callable[[int, list[str]], dict[str, Any]]
    in_config: bool = True
    fused: bool = False
    linears: Callable[[Tensor], tuple[Tensors, Tensor]] | None = None


@dataclass(frozen=True)
class Drawn:
    """An expert weight [rows, columns] of about this standard deviation, to be drawn as codes and scales."""

    rows: int
    columns: int
    std: float
    generator: torch.Generator

    def draw(self, fmt: WeightFormat) -> Quantized:
        """All codes are as likely, of a root mean square of 2.93; scales span a factor of four."""
        codes = self._bytes(self.columns // 2)
        bits = self._bytes(self.columns // fmt.group_k)
        steps = (bits & 1) + (bits >> 1 & 1)
        if fmt.has_global:  # 0.5, 1 or 2 in e4m3
            return Quantized(codes, steps * 8 + 0x30, torch.tensor(self.std / 2.93))
        return Quantized(codes, steps + (126 + round(math.log2(self.std / 2.93))), None)

    def _bytes(self, columns: int) -> Tensor:
        count = self.rows * columns
        words = torch.empty(-(-count // 8), dtype=torch.int64).random_(-(2**63), None, generator=self.generator)
        return words.view(torch.uint8)[:count].view(self.rows, columns).clone()


def quantized(w: Tensor | Drawn, fmt: WeightFormat) -> Quantized:
    return w.draw(fmt) if isinstance(w, Drawn) else quantize(w, fmt)


def _dense(w: Tensor | Drawn, parts: Quantized, fmt: WeightFormat, dtype: torch.dtype) -> Tensor:
    return torch.empty(0) if isinstance(w, Drawn) else dequantize(parts, fmt, dtype)


def _split(w: Tensor | Drawn, fmt: WeightFormat) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """(codes, raw scales, global scale, dense weight); dense in BF16 where that is exact, else in FP32.

    A drawn weight has no dense one.
    """
    parts = quantized(w, fmt)
    return *parts, _dense(w, parts, fmt, torch.float32 if fmt.has_global else torch.bfloat16)


# compressed-tensors


def _ct_mxfp4(w: Tensor | Drawn) -> tuple[Tensors, Tensor]:
    codes, scales, _, dense = _split(w, MXFP4)
    return {"weight_packed": codes, "weight_scale": scales}, dense


def _ct_nvfp4(w: Tensor | Drawn) -> tuple[Tensors, Tensor]:
    parts = quantized(w, NVFP4)
    assert parts.global_scale is not None
    stored = parts.global_scale.reciprocal().view(1)
    tensors = {
        "weight_packed": parts.codes,
        "weight_scale": parts.scales.view(torch.float8_e4m3fn),
        "weight_global_scale": stored,
    }
    return tensors, _dense(w, parts._replace(global_scale=stored.reciprocal()), NVFP4, torch.float32)


def _ct_nvfp4_w4a4(w: Tensor | Drawn) -> tuple[Tensors, Tensor]:
    tensors, dense = _ct_nvfp4(w)
    return tensors | {"input_global_scale": torch.tensor([1 / INPUT_SCALE])}, dense


def _ct_arguments(fmt: WeightFormat, **changes: Any) -> dict[str, Any]:
    return {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group" if fmt.has_global else "group",
        "group_size": fmt.group_k,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn" if fmt.has_global else "torch.uint8",
    } | changes


_CT_FP8 = {
    "num_bits": 8,
    "type": "float",
    "strategy": "group",
    "group_size": FP8_BLOCK,
    "symmetric": True,
    "dynamic": True,
}


def _ct_config(
    fmt: WeightFormat, activations: dict[str, Any] | None = None
) -> Callable[[int, list[str]], dict[str, Any]]:
    def config(layers: int, modules: list[str]) -> dict[str, Any]:
        name = f"{fmt.name}-pack-quantized"
        group = {"targets": ["Linear"], "weights": _ct_arguments(fmt), "format": name}
        if activations:
            group["input_activations"] = activations
        return {
            "quant_method": "compressed-tensors",
            "format": name,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": modules,
        }

    return config


# ModelOpt


def _modelopt(w: Tensor | Drawn) -> tuple[Tensors, Tensor]:
    codes, scales, global_scale, dense = _split(w, NVFP4)
    assert global_scale is not None
    tensors = {
        "weight": codes,
        "weight_scale": scales.view(torch.float8_e4m3fn),
        "weight_scale_2": global_scale,
        "input_scale": torch.tensor(INPUT_SCALE),
    }
    return tensors, dense


def _modelopt_fused(w: Tensor | Drawn) -> tuple[Tensors, Tensor]:
    tensors, dense = _modelopt(w)
    del tensors["input_scale"]  # vLLM has no name for fused ones
    return tensors, dense


def _modelopt_new(layers: int, modules: list[str]) -> dict[str, Any]:
    arguments = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    group = {"input_activations": arguments, "weights": arguments, "targets": ["Linear"]}
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "config_groups": {"group_0": group},
        "ignore": modules,
        "producer": {"name": "modelopt", "version": "0.39.0"},
    }


def _modelopt_old(layers: int, modules: list[str]) -> dict[str, Any]:
    return {
        "producer": {"name": "modelopt", "version": "0.29.0"},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": modules,
        },
    }


def _modelopt_mixed(layers: int, modules: list[str]) -> dict[str, Any]:
    """Experts of even layers as W4A4, those of odd layers as W4A16, everything else excluded."""
    algorithms = ("NVFP4", "W4A16_NVFP4")
    quantized = {
        f"model.layers.{layer}.mlp.experts.0.{name}": {"quant_algo": algorithms[layer % 2], "group_size": 16}
        for layer in range(layers)
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    return {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": quantized,
        "ignore": modules,
        "producer": {"name": "modelopt", "version": "0.39.0"},
    }


# Quark


def _quark(w: Tensor | Drawn) -> tuple[Tensors, Tensor]:
    codes, scales, _, dense = _split(w, MXFP4)
    return {"weight": codes, "weight_scale": scales}, dense


def _quark_config(layers: int, modules: list[str]) -> dict[str, Any]:
    arguments = {
        "dtype": "fp4",
        "qscheme": "per_group",
        "group_size": 32,
        "scale_format": "e8m0",
        "ch_axis": -1,
        "symmetric": None,
        "is_dynamic": False,
    }
    return {
        "quant_method": "quark",
        "global_quant_config": {
            "weight": arguments,
            "input_tensors": arguments | {"is_dynamic": True},
            "output_tensors": None,
            "bias": None,
        },
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": modules,
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
    }


# DeepSeek-V4 style: codes as int8, e8m0 scales, the linears in block FP8


def _deepseek(w: Tensor | Drawn) -> tuple[Tensors, Tensor]:
    codes, scales, _, dense = _split(w, MXFP4)
    return {"weight": codes.view(torch.int8), "weight_scale": scales.view(torch.float8_e8m0fnu)}, dense


def _deepseek_config(layers: int, modules: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "deepseek_v4_fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        "ignored_layers": modules,
    }


def block_fp8(w: Tensor) -> tuple[Tensors, Tensor]:
    """w [N, K], multiples of 128 -> e4m3 tensors with an e8m0 scale a block of 128 x 128, and the dense BF16 weight."""
    blocks = w.float().unflatten(0, (-1, FP8_BLOCK)).unflatten(2, (-1, FP8_BLOCK))
    _, exponent = torch.frexp(blocks.abs().amax((1, 3), keepdim=True))
    scale = torch.exp2(exponent.float() - 8)  # the largest magnitude lands in 128..256 of e4m3's 448
    codes = (blocks / scale).to(torch.float8_e4m3fn)
    dense = (codes.float() * scale).view_as(w).bfloat16()
    scales = scale[:, 0, :, 0].to(torch.float8_e8m0fnu)
    return {"weight": codes.view_as(w), "weight_scale_inv": scales}, dense


# BF16


def _bf16(fmt: WeightFormat) -> Callable[[Tensor | Drawn], tuple[Tensors, Tensor]]:
    def tensors(w: Tensor | Drawn) -> tuple[Tensors, Tensor]:
        assert isinstance(w, Tensor)
        return {"weight": w}, _split(w, fmt)[3]

    return tensors


def _no_config(layers: int, modules: list[str]) -> dict[str, Any]:
    return {}


STORAGES = {
    "mxfp4": Storage(MXFP4, _ct_mxfp4, _ct_config(MXFP4)),
    "mxfp4-w4a8": Storage(MXFP4, _ct_mxfp4, _ct_config(MXFP4, _CT_FP8)),
    "nvfp4": Storage(NVFP4, _ct_nvfp4, _ct_config(NVFP4)),
    "nvfp4-w4a4": Storage(NVFP4, _ct_nvfp4_w4a4, _ct_config(NVFP4, _ct_arguments(NVFP4, dynamic="local"))),
    "modelopt": Storage(NVFP4, _modelopt, _modelopt_new),
    "modelopt-old": Storage(NVFP4, _modelopt, _modelopt_old, in_config=False),
    "modelopt-mixed": Storage(NVFP4, _modelopt, _modelopt_mixed),
    "modelopt-fused": Storage(NVFP4, _modelopt_fused, _modelopt_new, fused=True),
    "quark": Storage(MXFP4, _quark, _quark_config),
    "deepseek": Storage(MXFP4, _deepseek, _deepseek_config, linears=block_fp8),
    "bf16": Storage(None, _bf16(MXFP4), _no_config),
    "bf16-nvfp4": Storage(None, _bf16(NVFP4), _no_config),
}
# Attention in the experts' format.
STORAGES |= {
    f"{name}-linears": replace(STORAGES[name], linears=STORAGES[name].tensors)
    for name in ("mxfp4", "nvfp4-w4a4", "modelopt")
}


def store(
    prefix: str, projections: Iterable[tuple[int, str, Tensor | Drawn]], storage: Storage
) -> tuple[Tensors, Tensors]:
    """Checkpoint and twin tensors of (expert, projection name, weight) under prefix; the twin is never fused."""
    tensors: Tensors = {}
    twin: Tensors = {}
    for expert, name, weight in projections:
        parts, dense = storage.tensors(weight)
        if isinstance(weight, Tensor):
            twin[f"{prefix}.{expert}.{name}.weight"] = dense
        tensors |= {f"{prefix}.{expert}.{name}.{suffix}": tensor for suffix, tensor in parts.items()}
    return (_fused(prefix, tensors) if storage.fused else tensors), twin


def _fused(prefix: str, tensors: Tensors) -> Tensors:
    """gate_proj, up_proj and down_proj of single experts -> gate_up_proj and down_proj over all of them.

    Names end in what followed "weight": gate_up_proj, gate_up_proj_scale, gate_up_proj_scale_2.
    """
    lists: dict[tuple[str, str], list[Tensor]] = {}
    for name, tensor in tensors.items():
        _, projection, suffix = name.removeprefix(f"{prefix}.").split(".")
        lists.setdefault((projection, suffix.removeprefix("weight")), []).append(tensor)
    stacked = {key: _stack(parts) for key, parts in lists.items()}
    fused = {f"{prefix}.down_proj{ending}": stacked["down_proj", ending] for _, ending in lists}
    for _, ending in lists:
        pair = [stacked[projection, ending] for projection in ("gate_proj", "up_proj")]
        fused[f"{prefix}.gate_up_proj{ending}"] = torch.stack(pair, 1) if pair[0].dim() == 1 else _cat(pair)
    return fused


def _stack(parts: list[Tensor]) -> Tensor:
    """torch.stack for every dtype that checkpoints have."""
    return torch.stack([part.view(torch.uint8) if part.itemsize == 1 else part for part in parts]).view(parts[0].dtype)


def _cat(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.view(torch.uint8) for part in parts], 1).view(parts[0].dtype)
