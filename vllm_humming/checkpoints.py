# SPDX-License-Identifier: Apache-2.0
"""Writes small, complete mixture-of-experts checkpoints that vLLM loads and serves, for the demo and the tests.

    python -m vllm_humming.checkpoints KIND DIR [--twin DIR] [--layers 2] [--hidden 256] ...

| kind | model | experts in the files |
|---|---|---|
| qwen3-mxfp4 | Qwen3-MoE | compressed-tensors `mxfp4-pack-quantized`, one 2-D tensor a projection and expert |
| gpt-oss-mxfp4 | gpt-oss | `mxfp4`, 3-D tensors over all experts, interleaved gate/up rows, biases |
| qwen3-bf16 | Qwen3-MoE | BF16, for quantisation while loading |

The twin of a checkpoint is the same model in BF16 with every expert weight replaced by its dequantised MXFP4 value:
an engine that runs MXFP4 exactly gives the twin's logprobs up to rounding. With equal sizes and seed the two qwen3
kinds have the same twin.

The weights are random, but the model is not: each token has one successor that the output layer is aligned to, so
greedy decoding has a clear winner at every step, and each token carries the code of its experts in the first dimensions
of its embedding, so that routing has clear winners too. Experts still contribute a large part of the hidden state.
The successors spell tokenizer.SENTENCE after tokenizer.PROMPT.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_humming.moe.quantize import dequantize_mxfp4, quantize_mxfp4
from vllm_humming.tokenizer import END, PROMPT, SENTENCE, build_tokenizer, save_tokenizer

KINDS = ("qwen3-mxfp4", "gpt-oss-mxfp4", "qwen3-bf16")
GROUP = 32  # K elements that share one MXFP4 scale

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Sizes:
    """Shape of a checkpoint. hidden, intermediate: multiples of 32; experts at most hidden / 4."""

    layers: int = 2
    hidden: int = 256
    intermediate: int = 192
    experts: int = 8
    top_k: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    vocab: int = 512

    def validate(self) -> None:
        """Raises ValueError naming the size that no checkpoint of these formats can have."""
        for name in ("hidden", "intermediate"):
            if getattr(self, name) % GROUP or getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected a positive multiple of {GROUP}")
        if not 1 <= self.top_k <= self.experts <= self.hidden // 4:
            raise ValueError(
                f"top_k {self.top_k}, experts {self.experts}, hidden {self.hidden}: "
                "expected 1 <= top_k <= experts <= hidden / 4"
            )
        if min(self.layers, self.heads, self.kv_heads, self.head_dim) < 1 or self.heads % self.kv_heads:
            raise ValueError(f"layers {self.layers}, heads {self.heads}, kv_heads {self.kv_heads}: not a transformer")


# gpt-oss has hidden = intermediate = 2880 = 22.5 * 128: the small one is no multiple of 64 or 128 either.
DEFAULT_SIZES = {
    "qwen3-mxfp4": Sizes(),
    "gpt-oss-mxfp4": Sizes(hidden=288, intermediate=288, top_k=4),
    "qwen3-bf16": Sizes(),
}


def write_checkpoint(
    directory: str | Path, kind: str, *, twin: str | Path | None = None, sizes: Sizes | None = None, seed: int = 0
) -> None:
    """Writes config, tokenizer and weights of `kind` to `directory`, and its dequantised BF16 twin to `twin` if given.

    Weights are written one layer at a time, so memory stays near one layer. The same arguments give the same files.
    Raises ValueError for an unknown kind or impossible sizes.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown checkpoint kind {kind!r}; known: {', '.join(KINDS)}")
    sizes = sizes or DEFAULT_SIZES[kind]
    sizes.validate()
    tokenizer = build_tokenizer()
    if sizes.vocab < tokenizer.get_vocab_size():
        raise ValueError(f"vocab is {sizes.vocab}, the tokenizer needs at least {tokenizer.get_vocab_size()}")
    config = _gpt_oss_config(sizes) if kind == "gpt-oss-mxfp4" else _qwen3_config(sizes)
    config["eos_token_id"] = tokenizer.token_to_id(END)

    outputs = [_Writer(Path(directory), config | _quantization_config(kind, sizes), sizes)]
    if twin is not None:
        outputs.append(_Writer(Path(twin), config, sizes))
    random = _Random(seed)
    for name, tensors, twin_tensors in _model(kind, sizes, random, _successors(tokenizer, random)):
        for output, part in zip(outputs, (tensors, twin_tensors), strict=False):
            output.add(name, part)
    for output in outputs:
        output.finish()
        save_tokenizer(tokenizer, output.directory)


class _Random:
    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=self.generator) * std

    def weight(self, out_features: int, in_features: int, gain: float = 1.0) -> Tensor:
        return self.normal(out_features, in_features, std=gain / math.sqrt(in_features))

    def expert(self, out_features: int, in_features: int, gain: float = 1.0) -> Tensor:
        """A BF16 weight whose row magnitudes span a factor of four, so that scales differ along both axes."""
        rows = torch.exp2(torch.rand(out_features, 1, generator=self.generator) * 2 - 1)
        return (self.weight(out_features, in_features, gain) * rows).bfloat16()


class _Writer:
    """One safetensors file a layer, and the index that vLLM and transformers read."""

    def __init__(self, directory: Path, config: dict[str, Any], sizes: Sizes) -> None:
        self.directory = directory
        self.weight_map: dict[str, str] = {}
        self.total_size = 0
        self.files = sizes.layers + 1
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    def add(self, index: int, tensors: Tensors) -> None:
        name = f"model-{index + 1:05d}-of-{self.files:05d}.safetensors"
        save_file({key: value.contiguous() for key, value in tensors.items()}, self.directory / name, {"format": "pt"})
        self.weight_map |= dict.fromkeys(tensors, name)
        self.total_size += sum(value.nbytes for value in tensors.values())

    def finish(self) -> None:
        index = {"metadata": {"total_size": self.total_size}, "weight_map": self.weight_map}
        (self.directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _successors(tokenizer: Any, random: _Random) -> Tensor:
    """successor[token]: a permutation of the real tokens in which PROMPT's last token leads through SENTENCE to END."""
    count = tokenizer.get_vocab_size()
    sentence = tokenizer.encode(SENTENCE).ids
    chain = [tokenizer.encode(PROMPT).ids[-1], *sentence, tokenizer.token_to_id(END)]
    if len(set(chain)) != len(chain):
        raise ValueError(f"the demo sentence repeats a token: {chain}")
    successor = torch.full((count,), -1)
    successor[chain[:-1]] = torch.tensor(chain[1:])
    sources = torch.nonzero(successor < 0).view(-1)
    is_target = torch.ones(count, dtype=torch.bool)
    is_target[chain[1:]] = False
    targets = torch.nonzero(is_target).view(-1)
    successor[sources] = targets[torch.randperm(len(targets), generator=random.generator)]
    return successor


def _model(kind: str, sizes: Sizes, random: _Random, successor: Tensor) -> Iterator[tuple[int, Tensors, Tensors]]:
    """(file number, tensors of the checkpoint, tensors of its twin) for the embeddings, then each layer."""
    embedding = random.normal(sizes.vocab, sizes.hidden)
    chosen = torch.rand(sizes.vocab, sizes.experts, generator=random.generator).topk(sizes.top_k).indices
    code = torch.zeros(sizes.vocab, sizes.experts)
    code.scatter_(1, chosen, (4.0 * 0.9 ** torch.arange(sizes.top_k)).expand(sizes.vocab, -1))
    embedding[:, : sizes.experts] = code
    # The final norm gives rows of length sqrt(hidden); 0.5 leaves the winner's probability near one half.
    head = random.weight(sizes.vocab, sizes.hidden, 0.5)
    head[successor] = 0.5 * torch.nn.functional.normalize(embedding[: len(successor)], dim=1)
    ends = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(sizes.hidden),
        "lm_head.weight": head,
    }
    ends = {name: tensor.bfloat16() for name, tensor in ends.items()}
    yield 0, ends, ends

    experts: Callable[[str, Sizes, _Random], tuple[Tensors, Tensors]]
    experts = {"qwen3-mxfp4": _qwen3_mxfp4, "gpt-oss-mxfp4": _gpt_oss_mxfp4, "qwen3-bf16": _qwen3_bf16}[kind]
    for layer in range(sizes.layers):
        prefix = f"model.layers.{layer}."
        common = _attention(prefix, sizes, random, gpt_oss=kind == "gpt-oss-mxfp4")
        gate = random.weight(sizes.experts, sizes.hidden, 0.3)
        gate[:, : sizes.experts] = torch.eye(sizes.experts)[torch.randperm(sizes.experts, generator=random.generator)]
        if kind == "gpt-oss-mxfp4":
            common |= {
                f"{prefix}mlp.router.weight": gate,
                f"{prefix}mlp.router.bias": random.normal(sizes.experts, std=0.1),
            }
        else:
            common[f"{prefix}mlp.gate.weight"] = gate
        common = {name: tensor.bfloat16() for name, tensor in common.items()}
        tensors, twin = experts(f"{prefix}mlp.experts", sizes, random)
        yield layer + 1, common | tensors, common | twin


def _attention(prefix: str, sizes: Sizes, random: _Random, *, gpt_oss: bool) -> Tensors:
    width, kv_width = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    shapes = {
        "q_proj": (width, sizes.hidden, 1.0),
        "k_proj": (kv_width, sizes.hidden, 1.0),
        "v_proj": (kv_width, sizes.hidden, 1.0),
        "o_proj": (sizes.hidden, width, 0.5),
    }
    tensors = {
        f"{prefix}{norm}.weight": torch.ones(sizes.hidden) for norm in ("input_layernorm", "post_attention_layernorm")
    }
    for name, (rows, columns, gain) in shapes.items():
        tensors[f"{prefix}self_attn.{name}.weight"] = random.weight(rows, columns, gain)
        if gpt_oss:
            tensors[f"{prefix}self_attn.{name}.bias"] = random.normal(rows, std=0.1)
    if gpt_oss:
        tensors[f"{prefix}self_attn.sinks"] = random.normal(sizes.heads)
    else:
        tensors |= {f"{prefix}self_attn.{norm}.weight": torch.ones(sizes.head_dim) for norm in ("q_norm", "k_norm")}
    return tensors


def _qwen3_projections(prefix: str, sizes: Sizes, random: _Random) -> Iterator[tuple[str, Tensor]]:
    for expert in range(sizes.experts):
        for name in ("gate_proj", "up_proj"):
            yield f"{prefix}.{expert}.{name}", random.expert(sizes.intermediate, sizes.hidden)
        yield f"{prefix}.{expert}.down_proj", random.expert(sizes.hidden, sizes.intermediate, 1.2)


def _qwen3_mxfp4(prefix: str, sizes: Sizes, random: _Random) -> tuple[Tensors, Tensors]:
    tensors, twin = {}, {}
    for name, weight in _qwen3_projections(prefix, sizes, random):
        codes, scales = quantize_mxfp4(weight)
        tensors[f"{name}.weight_packed"] = codes
        tensors[f"{name}.weight_scale"] = scales
        twin[f"{name}.weight"] = dequantize_mxfp4(codes, scales, torch.bfloat16)
    return tensors, twin


def _qwen3_bf16(prefix: str, sizes: Sizes, random: _Random) -> tuple[Tensors, Tensors]:
    tensors, twin = {}, {}
    for name, weight in _qwen3_projections(prefix, sizes, random):
        tensors[f"{name}.weight"] = weight
        twin[f"{name}.weight"] = dequantize_mxfp4(*quantize_mxfp4(weight), torch.bfloat16)
    return tensors, twin


def _gpt_oss_mxfp4(prefix: str, sizes: Sizes, random: _Random) -> tuple[Tensors, Tensors]:
    tensors, twin = {}, {}
    # gate_up_proj's rows are gate 0, up 0, gate 1, up 1, ...: random rows need no shuffling to be that.
    for name, rows, columns, gain in (
        ("gate_up_proj", 2 * sizes.intermediate, sizes.hidden, 1.0),
        ("down_proj", sizes.hidden, sizes.intermediate, 0.7),
    ):
        pairs = [quantize_mxfp4(random.expert(rows, columns, gain)) for _ in range(sizes.experts)]
        codes = torch.stack([codes for codes, _ in pairs])
        tensors[f"{prefix}.{name}_blocks"] = codes.view(sizes.experts, rows, columns // GROUP, GROUP // 2)
        tensors[f"{prefix}.{name}_scales"] = torch.stack([scales for _, scales in pairs])
        # The unquantised gpt-oss layout is [experts, in, out].
        twin[f"{prefix}.{name}"] = torch.stack([dequantize_mxfp4(*pair, torch.bfloat16).T for pair in pairs])
        bias = random.normal(sizes.experts, rows, std=0.3).bfloat16()
        tensors[f"{prefix}.{name}_bias"] = bias
        twin[f"{prefix}.{name}_bias"] = bias
    return tensors, twin


def _common_config(sizes: Sizes) -> dict[str, Any]:
    return {
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "num_experts_per_tok": sizes.top_k,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def _qwen3_config(sizes: Sizes) -> dict[str, Any]:
    return _common_config(sizes) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "intermediate_size": 4 * sizes.hidden,
        "moe_intermediate_size": sizes.intermediate,
        "num_experts": sizes.experts,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
    }


def _gpt_oss_config(sizes: Sizes) -> dict[str, Any]:
    return _common_config(sizes) | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "intermediate_size": sizes.intermediate,
        "num_local_experts": sizes.experts,
        "attention_bias": True,
        "swiglu_limit": 7.0,
        "sliding_window": 128,
        "layer_types": [("full_attention" if i % 2 else "sliding_attention") for i in range(sizes.layers)],
        "initial_context_length": 4096,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    }


def _quantization_config(kind: str, sizes: Sizes) -> dict[str, Any]:
    """The `quantization_config` entry of config.json, or nothing for an unquantised checkpoint."""
    if kind == "qwen3-bf16":
        return {}
    if kind == "gpt-oss-mxfp4":
        unquantised = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        return {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": unquantised}}
    ignore = ["lm_head"]
    for layer in range(sizes.layers):
        ignore += [f"model.layers.{layer}.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
        ignore.append(f"model.layers.{layer}.mlp.gate")
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "group",
        "group_size": GROUP,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.uint8",
    }
    group = {"targets": ["Linear"], "weights": weights, "format": "mxfp4-pack-quantized"}
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ignore,
        }
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_humming.checkpoints", description="Write a small MoE checkpoint."
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--twin", type=Path, help="also write the dequantised BF16 model here")
    parser.add_argument("--seed", type=int, default=0)
    for field in fields(Sizes):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, help="default: the kind's own small size")
    args = parser.parse_args()
    given = {name: getattr(args, name) for name in asdict(Sizes()) if getattr(args, name) is not None}
    write_checkpoint(
        args.directory, args.kind, twin=args.twin, sizes=replace(DEFAULT_SIZES[args.kind], **given), seed=args.seed
    )
    print(args.directory)


if __name__ == "__main__":
    main()
