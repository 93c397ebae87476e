# SPDX-License-Identifier: Apache-2.0
"""Qwen3-MoE and other per-expert checkpoints in BF16, MXFP4 and NVFP4, and the way from one to another.

    python -m evals.weights SOURCE TARGET --format bf16|mxfp4|nvfp4

SOURCE is a directory with BF16 or MXFP4 experts stored one 2-D tensor each (`...experts.3.up_proj.weight`, or
`.weight_packed` and `.weight_scale`; Mixtral's w1 to w3 too). bf16 writes the dequantised experts, exactly; mxfp4 and
nvfp4 write compressed-tensors checkpoints of the dequantised experts (values that MXFP4 already holds stay as they
are). Everything but the experts is copied.

NVFP4 here: e2m1 elements in groups of 16 with an e4m3 scale, and one FP32 factor for a projection, which gate and up
share. The factor is a power of two, so that every dequantised weight is a BF16 number and the BF16 twin is exact.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vllm_humming.moe import quantize
from vllm_humming.moe.quantize import dequantize_mxfp4, quantize_mxfp4
from vllm_humming.moe.weight_formats import NVFP4

FORMATS = ("bf16", "mxfp4", "nvfp4")
E4M3_MAX = 448.0
E2M1_MAX = 6.0
EXPERT = re.compile(r"(?P<expert>.*\.experts\.\d+)\.(?P<projection>(gate|up|down)_proj|w[123])\.(?P<part>\w+)$")
# Projections that vLLM joins, and so share one NVFP4 factor; w1, w2, w3 are Mixtral's names.
JOINED = {"gate_proj": "up_proj", "up_proj": "gate_proj", "w1": "w3", "w3": "w1"}

Tensors = dict[str, Tensor]


def nvfp4_factor(weights: Iterable[Tensor]) -> float:
    """The FP32 factor of projections that share one: the largest power of two under which all scales fit in e4m3.

    A weight is element * scale / factor, as compressed-tensors stores it.
    """
    amax = max(float(weight.abs().amax()) for weight in weights)
    return 2.0 ** math.floor(math.log2(E4M3_MAX * E2M1_MAX / amax)) if amax > 0 else 1.0


def quantize_nvfp4(weight: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> (codes uint8 [N, K/2], even k in the low nibble; scales e4m3 [N, K/16]), for that factor."""
    codes, scales, _ = quantize.quantize_nvfp4(weight, torch.tensor(1 / factor, dtype=torch.float32))
    return codes, scales.view(torch.float8_e4m3fn)


def dequantize_nvfp4(codes: Tensor, scales: Tensor, factor: float) -> Tensor:
    """The exact weights, float32 [N, K]. Raises ValueError for a factor that is no power of two."""
    if math.frexp(factor)[0] != 0.5:
        raise ValueError(f"the NVFP4 factor must be a power of two, found {factor}")
    global_scale = torch.tensor(1 / factor, dtype=torch.float32)
    return quantize.dequantize_nvfp4(codes, scales.view(torch.uint8), global_scale, torch.float32)


def quantise_experts(dense: Tensors, weight_format: str) -> Tensors:
    """The tensors of a checkpoint of weight_format, whose experts in `dense` are BF16 2-D tensors."""
    tensors: Tensors = {}
    for name, weight in dense.items():
        match = EXPERT.match(name)
        base = name.removesuffix(".weight")
        if match is None or weight_format == "bf16":
            tensors[name] = weight
        elif weight_format == "mxfp4":
            tensors[f"{base}.weight_packed"], tensors[f"{base}.weight_scale"] = quantize_mxfp4(weight)
        elif weight_format == "nvfp4":
            names = {match["projection"], JOINED.get(match["projection"], match["projection"])}
            factor = nvfp4_factor(dense[f"{match['expert']}.{part}.weight"] for part in names)
            tensors[f"{base}.weight_packed"], tensors[f"{base}.weight_scale"] = quantize_nvfp4(weight, factor)
            tensors[f"{base}.weight_global_scale"] = torch.tensor([factor], dtype=torch.float32)
        else:
            raise ValueError(f"unknown format {weight_format!r}; known: {', '.join(FORMATS)}")
    return tensors


def dequantise_experts(tensors: Tensors) -> Tensors:
    """BF16 tensors of a BF16, MXFP4 or NVFP4 checkpoint; raises ValueError if a weight is no BF16 number."""
    dense: Tensors = {}
    for name, tensor in tensors.items():
        match = EXPERT.match(name)
        if match is None or match["part"] == "weight":
            dense[name] = tensor
        elif match["part"] == "weight_packed":
            base = name.removesuffix(".weight_packed")
            scales = tensors[f"{base}.weight_scale"]
            factor = tensors.get(f"{base}.weight_global_scale")
            if factor is None:
                exact = dequantize_mxfp4(tensor, scales.view(torch.uint8), torch.float32)
            else:
                exact = dequantize_nvfp4(tensor, scales, float(factor))
            weight = exact.bfloat16()
            if not torch.equal(weight.float(), exact):
                raise ValueError(f"{name}: dequantised weights are no BF16 numbers")
            dense[f"{base}.weight"] = weight
    return dense


def quantization_config(weight_format: str, unquantised: Iterable[str]) -> dict[str, Any]:
    """The `quantization_config` entry of config.json, or nothing for bf16. unquantised: names of other linears."""
    if weight_format == "bf16":
        return {}
    weights: dict[str, Any] = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False}
    if weight_format == "mxfp4":
        weights |= {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    else:
        weights |= {"strategy": "tensor_group", "group_size": NVFP4.group_k}
        weights |= {"scale_dtype": "torch.float8_e4m3fn"}
    name = f"{weight_format}-pack-quantized"
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": name,
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "format": name}},
            "ignore": sorted(unquantised),
        }
    }


def unquantised_linears(names: Iterable[str]) -> list[str]:
    """The linears of a checkpoint that are no experts, by the names of its tensors."""
    linears = {name.removesuffix(".weight") for name in names if not EXPERT.match(name)}
    return sorted({"lm_head"} | {name for name in linears if re.search(r"(_proj|\.gate)$", name)})


def write(directory: Path, config: dict[str, Any], dense: Tensors, weight_format: str) -> int:
    """Writes config.json and model.safetensors of a checkpoint given in BF16; returns the bytes of the weights."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in config.items() if key != "quantization_config"}
    config |= quantization_config(weight_format, unquantised_linears(dense))
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: tensor.cpu().contiguous() for name, tensor in quantise_experts(dense, weight_format).items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return sum(tensor.nbytes for tensor in tensors.values())


def read(directory: Path) -> tuple[dict[str, Any], Tensors]:
    """config.json and the dequantised BF16 tensors of a checkpoint."""
    config = json.loads((directory / "config.json").read_text())
    tensors: Tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(path)
    if not tensors:
        raise FileNotFoundError(f"no safetensors files in {directory}")
    return config, dequantise_experts(tensors)


def convert(source: Path, target: Path, weight_format: str) -> int:
    """Writes the checkpoint `source` as `weight_format` to `target`, tokenizer included; returns the weights' bytes."""
    config, dense = read(source)
    size = write(target, config, dense, weight_format)
    left = {"config.json", "model.safetensors.index.json", "README.md", "training.json"}
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name not in left:
            shutil.copyfile(path, target / path.name)
    return size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--format", choices=FORMATS, required=True)
    args = parser.parse_args()
    size = convert(args.source, args.target, args.format)
    print(f"{args.target}: {args.format}, {size / 1e6:.2f} MB of weights")


if __name__ == "__main__":
    main()
