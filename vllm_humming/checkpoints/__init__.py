# SPDX-License-Identifier: Apache-2.0
"""Writes small, complete mixture-of-experts checkpoints that vLLM loads and serves, for the demo and the tests.

    python -m vllm_humming.checkpoints KIND DIR [--twin DIR] [--drawn] [--layers 2] [--hidden 256] ...

| kind | model | experts in the files |
|---|---|---|
| qwen3-mxfp4 | Qwen3-MoE | compressed-tensors `mxfp4-pack-quantized`, one 2-D tensor a projection and expert |
| qwen3-mxfp4-w4a8 | Qwen3-MoE | the same, with FP8 activations in blocks of 128 |
| qwen3-nvfp4 | Qwen3-MoE | compressed-tensors `nvfp4-pack-quantized`, W4A16 |
| qwen3-nvfp4-w4a4 | Qwen3-MoE | the same with the scales of 4-bit activations |
| qwen3-modelopt | Qwen3-MoE | ModelOpt NVFP4, described in config.json |
| qwen3-modelopt-old | Qwen3-MoE | ModelOpt NVFP4, described in hf_quant_config.json |
| qwen3-modelopt-mixed | Qwen3-MoE | ModelOpt mixed precision: NVFP4 and W4A16 NVFP4 by layer |
| qwen3-modelopt-fused | Qwen3-MoE | ModelOpt NVFP4, one 3-D tensor over all experts, gate and up joined |
| qwen3-quark | Qwen3-MoE | Quark MXFP4 |
| qwen3-deepseek | Qwen3-MoE | as DeepSeek-V4: int8 codes and e8m0 scales, attention in block FP8 |
| gpt-oss-mxfp4 | gpt-oss | `mxfp4`, 3-D tensors over all experts, interleaved gate/up rows, biases |
| nemotron-h-modelopt | Nemotron-H | ModelOpt NVFP4, non-gated ReLU^2 experts |
| qwen3-mxfp4-linears | Qwen3-MoE | as qwen3-mxfp4, and attention's linears in the same format |
| qwen3-nvfp4-linears | Qwen3-MoE | as qwen3-nvfp4-w4a4, and attention's linears in the same format |
| qwen3-modelopt-linears | Qwen3-MoE | as qwen3-modelopt, and attention's linears in the same format |
| qwen3-bf16 | Qwen3-MoE | BF16, for quantisation to MXFP4 while loading |
| qwen3-bf16-nvfp4 | Qwen3-MoE | the same files with the sizes and the twin of quantisation to NVFP4 |

The twin of a checkpoint is the same model with every quantised weight replaced by its dequantised value, in BF16 where
that is exact and in FP32 else (NVFP4, whose global scale is any number): an engine that runs the format exactly gives
the twin's logprobs up to rounding. With equal sizes and seed the qwen3 kinds of one weight format have the same twin
(compressed-tensors NVFP4 but for the last bit, as it stores reciprocals), apart from those whose attention is
quantised, too: qwen3-deepseek, and the linears kinds, which share theirs in the same way.

The weights are random, but the model is not: each token has one successor that the output layer is aligned to, so
greedy decoding has a clear winner at every step, and each token carries the code of its experts in the first dimensions
of its embedding, so that routing has clear winners too. Experts still contribute a large part of the hidden state.
The successors spell tokenizer.SENTENCE after tokenizer.PROMPT.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from vllm_humming.checkpoints.models import GptOss, NemotronH, Qwen3, Random, Sizes, successors
from vllm_humming.checkpoints.storage import STORAGES, Storage, Tensors
from vllm_humming.moe.weight_formats import MXFP4, NVFP4
from vllm_humming.tokenizer import END, build_tokenizer, save_tokenizer

__all__ = ["DEFAULT_SIZES", "KINDS", "Sizes", "weight_format", "write_checkpoint"]


@dataclass(frozen=True)
class _Kind:
    model: type[Qwen3]
    storage: Storage | None  # None: a format of the model's own


_KINDS = {
    "qwen3-mxfp4": _Kind(Qwen3, STORAGES["mxfp4"]),
    "qwen3-mxfp4-w4a8": _Kind(Qwen3, STORAGES["mxfp4-w4a8"]),
    "qwen3-nvfp4": _Kind(Qwen3, STORAGES["nvfp4"]),
    "qwen3-nvfp4-w4a4": _Kind(Qwen3, STORAGES["nvfp4-w4a4"]),
    "qwen3-modelopt": _Kind(Qwen3, STORAGES["modelopt"]),
    "qwen3-modelopt-old": _Kind(Qwen3, STORAGES["modelopt-old"]),
    "qwen3-modelopt-mixed": _Kind(Qwen3, STORAGES["modelopt-mixed"]),
    "qwen3-modelopt-fused": _Kind(Qwen3, STORAGES["modelopt-fused"]),
    "qwen3-quark": _Kind(Qwen3, STORAGES["quark"]),
    "qwen3-deepseek": _Kind(Qwen3, STORAGES["deepseek"]),
    "qwen3-mxfp4-linears": _Kind(Qwen3, STORAGES["mxfp4-linears"]),
    "qwen3-nvfp4-linears": _Kind(Qwen3, STORAGES["nvfp4-w4a4-linears"]),
    "qwen3-modelopt-linears": _Kind(Qwen3, STORAGES["modelopt-linears"]),
    "gpt-oss-mxfp4": _Kind(GptOss, None),
    "nemotron-h-modelopt": _Kind(NemotronH, STORAGES["modelopt"]),
    "qwen3-bf16": _Kind(Qwen3, STORAGES["bf16"]),
    "qwen3-bf16-nvfp4": _Kind(Qwen3, STORAGES["bf16-nvfp4"]),
}
KINDS = tuple(_KINDS)


def _default_sizes(kind: str) -> Sizes:
    if kind == "gpt-oss-mxfp4":
        # gpt-oss has hidden = intermediate = 2880 = 22.5 * 128: the small one is no multiple of 64 or 128 either.
        return Sizes(hidden=288, intermediate=288, top_k=4)
    if weight_format(kind) is NVFP4:
        # No multiples of 64. vLLM's own CPU kernel, which runs the twin, wants multiples of 32.
        return Sizes(hidden=288, intermediate=224)
    return Sizes()


def weight_format(kind: str) -> Any:
    """The format that the experts of a checkpoint are stored in, or quantised to while loading."""
    storage = _KINDS[kind].storage
    if kind == "qwen3-bf16-nvfp4":
        return NVFP4
    return MXFP4 if storage is None or storage.weight_format is None else storage.weight_format


DEFAULT_SIZES = {kind: _default_sizes(kind) for kind in KINDS}


def write_checkpoint(
    directory: str | Path,
    kind: str,
    *,
    twin: str | Path | None = None,
    sizes: Sizes | None = None,
    seed: int = 0,
    drawn: bool = False,
) -> None:
    """Writes config, tokenizer and weights of `kind` to `directory`, and its dequantised twin to `twin` if given.

    Weights are written one layer at a time, so memory stays near one layer. The same arguments give the same files.
    drawn: random codes and scales instead of quantised random weights, and experts of a token that weigh the same: full
    sizes in seconds, without a twin.
    Raises ValueError for an unknown kind or impossible sizes.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown checkpoint kind {kind!r}; known: {', '.join(KINDS)}")
    sizes = sizes or DEFAULT_SIZES[kind]
    storage = _KINDS[kind].storage
    if drawn and (twin is not None or (storage is not None and storage.weight_format is None)):
        raise ValueError("a drawn checkpoint has FP4 experts and no twin")
    model = _KINDS[kind].model(sizes, storage)
    model.validate(weight_format(kind).group_k)
    tokenizer = build_tokenizer()
    if sizes.vocab < tokenizer.get_vocab_size():
        raise ValueError(f"vocab is {sizes.vocab}, the tokenizer needs at least {tokenizer.get_vocab_size()}")
    config = model.config() | {"eos_token_id": tokenizer.token_to_id(END)}
    quantization = model.quantization()
    inside = {"quantization_config": quantization} if quantization and (storage is None or storage.in_config) else {}

    outputs = [_Writer(Path(directory), config | inside, sizes)]
    if quantization and not inside:
        _write_json(Path(directory) / "hf_quant_config.json", quantization)
    if twin is not None:
        outputs.append(_Writer(Path(twin), config, sizes))
    random = Random(seed, drawn)
    for name, tensors, twin_tensors in model.tensors(random, successors(tokenizer, random)):
        for output, part in zip(outputs, (tensors, twin_tensors), strict=False):
            output.add(name, part)
    for output in outputs:
        output.finish()
        save_tokenizer(tokenizer, output.directory)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


class _Writer:
    """One safetensors file a layer, and the index that vLLM and transformers read."""

    def __init__(self, directory: Path, config: dict[str, Any], sizes: Sizes) -> None:
        self.directory = directory
        self.weight_map: dict[str, str] = {}
        self.total_size = 0
        self.files = sizes.layers + 1
        directory.mkdir(parents=True, exist_ok=True)
        _write_json(directory / "config.json", config)

    def add(self, index: int, tensors: Tensors) -> None:
        name = f"model-{index + 1:05d}-of-{self.files:05d}.safetensors"
        save_file({key: value.contiguous() for key, value in tensors.items()}, self.directory / name, {"format": "pt"})
        self.weight_map |= dict.fromkeys(tensors, name)
        self.total_size += sum(value.nbytes for value in tensors.values())

    def finish(self) -> None:
        index = {"metadata": {"total_size": self.total_size}, "weight_map": self.weight_map}
        _write_json(self.directory / "model.safetensors.index.json", index)
