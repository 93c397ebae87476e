# SPDX-License-Identifier: Apache-2.0
"""The small models: their configs, and the tensors of embeddings, attention, routers and experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_humming.checkpoints.storage import FP8_BLOCK, Drawn, Storage, Tensors, block_fp8, quantized, store
from vllm_humming.moe.quantize import dequantize
from vllm_humming.moe.weight_formats import MXFP4
from vllm_humming.tokenizer import END, PROMPT, SENTENCE


@dataclass(frozen=True)
class Sizes:
    """Shape of a checkpoint. hidden, intermediate: multiples of the scale group; experts at most hidden / 4."""

    layers: int = 2
    hidden: int = 256
    intermediate: int = 192
    experts: int = 8
    top_k: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    vocab: int = 512

    def validate(self, group: int = MXFP4.group_k) -> None:
        """Raises ValueError naming the size that no checkpoint of such a scale group can have."""
        for name in ("hidden", "intermediate"):
            if getattr(self, name) % group or getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected a positive multiple of {group}")
        if not 1 <= self.top_k <= self.experts <= self.hidden // 4:
            raise ValueError(
                f"top_k {self.top_k}, experts {self.experts}, hidden {self.hidden}: "
                "expected 1 <= top_k <= experts <= hidden / 4"
            )
        if min(self.layers, self.heads, self.kv_heads, self.head_dim) < 1 or self.heads % self.kv_heads:
            raise ValueError(f"layers {self.layers}, heads {self.heads}, kv_heads {self.kv_heads}: not a transformer")


class Random:
    """drawn: experts are drawn as codes and scales, not as floats to be quantised."""

    def __init__(self, seed: int, drawn: bool = False) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.drawn = drawn

    def normal(self, *shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=self.generator) * std

    def weight(self, out_features: int, in_features: int, gain: float = 1.0) -> Tensor:
        return self.normal(out_features, in_features, std=gain / math.sqrt(in_features))

    def expert(self, out_features: int, in_features: int, gain: float = 1.0) -> Tensor | Drawn:
        """A BF16 weight whose row magnitudes span a factor of four, so that scales differ along both axes."""
        if self.drawn:
            return Drawn(out_features, in_features, gain / math.sqrt(in_features), self.generator)
        rows = torch.exp2(torch.rand(out_features, 1, generator=self.generator) * 2 - 1)
        return (self.weight(out_features, in_features, gain) * rows).bfloat16()


def successors(tokenizer: Any, random: Random) -> Tensor:
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


class Qwen3:
    """Qwen3-MoE: gated SiLU experts. Also the names that the other models change."""

    layers_prefix = "model.layers"
    embedding = "model.embed_tokens.weight"
    final_norm = "model.norm.weight"

    def __init__(self, sizes: Sizes, storage: Storage | None) -> None:
        self.sizes, self.storage = sizes, storage

    def config(self) -> dict[str, Any]:
        """config.json without its quantization_config."""
        sizes = self.sizes
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

    def validate(self, group: int) -> None:
        """Raises ValueError naming the size that no such checkpoint can have. group: K that share a scale."""
        self.sizes.validate(group)
        if self.storage is None or self.storage.linears is None:
            return
        sizes, fp8 = self.sizes, self.storage.linears is block_fp8
        widths = {"hidden": sizes.hidden} | {
            f"{name} * head_dim": getattr(sizes, name) * sizes.head_dim for name in ("heads", "kv_heads")
        }
        for name, width in widths.items():
            if fp8 and width % FP8_BLOCK:
                raise ValueError(f"{name} is {width}, block FP8 needs a multiple of {FP8_BLOCK}")
            if name == "heads * head_dim" and width % group:
                raise ValueError(f"{name} is {width}, expected a multiple of {group}")

    def quantization(self) -> dict[str, Any]:
        """The quantization_config, or nothing for an unquantised checkpoint."""
        assert self.storage is not None
        return self.storage.config(self.sizes.layers, self.unquantized_modules())

    def unquantized_modules(self) -> list[str]:
        assert self.storage is not None
        modules = ["lm_head"]
        for layer in range(self.sizes.layers):
            prefix = f"{self.layers_prefix}.{layer}"
            if self.storage.linears is None:
                modules += [f"{prefix}.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
            modules.append(f"{prefix}.mlp.gate")
        return modules

    def tensors(self, random: Random, successor: Tensor) -> Iterator[tuple[int, Tensors, Tensors]]:
        """(file number, tensors of the checkpoint, tensors of its twin) for the embeddings, then each layer."""
        sizes = self.sizes
        embedding = random.normal(sizes.vocab, sizes.hidden)
        chosen = torch.rand(sizes.vocab, sizes.experts, generator=random.generator).topk(sizes.top_k).indices
        code = torch.zeros(sizes.vocab, sizes.experts)
        # Of many experts the last chosen one would hardly lead the others; where they weigh the same, all of them do.
        weights = torch.full((sizes.top_k,), 6.0) if random.drawn else 4.0 * 0.9 ** torch.arange(sizes.top_k)
        code.scatter_(1, chosen, weights.expand(sizes.vocab, -1))
        embedding[:, : sizes.experts] = code
        # The final norm gives rows of length sqrt(hidden); 0.5 leaves the winner's probability near one half.
        head = random.weight(sizes.vocab, sizes.hidden, 0.5)
        head[successor] = 0.5 * torch.nn.functional.normalize(embedding[: len(successor)], dim=1)
        ends = {self.embedding: embedding, self.final_norm: torch.ones(sizes.hidden), "lm_head.weight": head}
        ends = {name: tensor.bfloat16() for name, tensor in ends.items()}
        yield 0, ends, ends
        for layer in range(sizes.layers):
            attention = _bf16(self.attention(layer, random))
            gate = random.weight(sizes.experts, sizes.hidden, 0.3)
            order = torch.randperm(sizes.experts, generator=random.generator)
            gate[:, : sizes.experts] = torch.eye(sizes.experts)[order]
            router = _bf16(self.router(layer, gate, random))
            experts, twin = self.experts(layer, random)
            stored = attention
            if self.storage is not None and self.storage.linears is not None:
                stored, attention = _with_quantised_linears(attention, self.storage.linears)
            yield layer + 1, stored | router | experts, attention | router | twin

    def attention(self, layer: int, random: Random) -> Tensors:
        prefix = f"{self.layers_prefix}.{layer}."
        tensors = {
            f"{prefix}{norm}.weight": torch.ones(self.sizes.hidden)
            for norm in ("input_layernorm", "post_attention_layernorm")
        }
        tensors |= _projections(f"{prefix}self_attn.", self.sizes, random)
        return tensors | {
            f"{prefix}self_attn.{norm}.weight": torch.ones(self.sizes.head_dim) for norm in ("q_norm", "k_norm")
        }

    def router(self, layer: int, gate: Tensor, random: Random) -> Tensors:
        return {f"{self.layers_prefix}.{layer}.mlp.gate.weight": gate}

    def experts(self, layer: int, random: Random) -> tuple[Tensors, Tensors]:
        assert self.storage is not None
        sizes = self.sizes

        def projections() -> Iterator[tuple[int, str, Tensor | Drawn]]:
            for expert in range(sizes.experts):
                for name in ("gate_proj", "up_proj"):
                    yield expert, name, random.expert(sizes.intermediate, sizes.hidden)
                yield expert, "down_proj", random.expert(sizes.hidden, sizes.intermediate, 1.2)

        return store(f"{self.layers_prefix}.{layer}.mlp.experts", projections(), self.storage)


class GptOss(Qwen3):
    """gpt-oss: interleaved, clamped SwiGLU experts with biases, in the mxfp4 format of its own."""

    def config(self) -> dict[str, Any]:
        sizes = self.sizes
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

    def quantization(self) -> dict[str, Any]:
        unquantised = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        return {"quant_method": "mxfp4", "modules_to_not_convert": unquantised}

    def attention(self, layer: int, random: Random) -> Tensors:
        prefix = f"{self.layers_prefix}.{layer}."
        tensors = {
            f"{prefix}{norm}.weight": torch.ones(self.sizes.hidden)
            for norm in ("input_layernorm", "post_attention_layernorm")
        }
        tensors |= _projections(f"{prefix}self_attn.", self.sizes, random, bias=True)
        return tensors | {f"{prefix}self_attn.sinks": random.normal(self.sizes.heads)}

    def router(self, layer: int, gate: Tensor, random: Random) -> Tensors:
        prefix = f"{self.layers_prefix}.{layer}.mlp.router"
        return {f"{prefix}.weight": gate, f"{prefix}.bias": random.normal(self.sizes.experts, std=0.1)}

    def experts(self, layer: int, random: Random) -> tuple[Tensors, Tensors]:
        prefix, sizes = f"{self.layers_prefix}.{layer}.mlp.experts", self.sizes
        tensors, twin = {}, {}
        # gate_up_proj's rows are gate 0, up 0, gate 1, up 1, ...: random rows need no shuffling to be that.
        for name, rows, columns, gain in (
            ("gate_up_proj", 2 * sizes.intermediate, sizes.hidden, 1.0),
            ("down_proj", sizes.hidden, sizes.intermediate, 0.7),
        ):
            parts = [quantized(random.expert(rows, columns, gain), MXFP4) for _ in range(sizes.experts)]
            codes = torch.stack([part.codes for part in parts])
            groups = columns // MXFP4.group_k
            tensors[f"{prefix}.{name}_blocks"] = codes.view(sizes.experts, rows, groups, -1)
            tensors[f"{prefix}.{name}_scales"] = torch.stack([part.scales for part in parts])
            if not random.drawn:
                # The unquantised gpt-oss layout is [experts, in, out].
                dense = [dequantize(part, MXFP4, torch.bfloat16).T for part in parts]
                twin[f"{prefix}.{name}"] = torch.stack(dense)
            bias = random.normal(sizes.experts, rows, std=0.3).bfloat16()
            tensors[f"{prefix}.{name}_bias"] = bias
            twin[f"{prefix}.{name}_bias"] = bias
        return tensors, twin


class NemotronH(Qwen3):
    """Nemotron-H without its Mamba layers: attention and non-gated ReLU^2 experts take turns.

    sizes.layers counts pairs of the two.
    """

    layers_prefix = "backbone.layers"
    embedding = "backbone.embeddings.weight"
    final_norm = "backbone.norm_f.weight"

    def config(self) -> dict[str, Any]:
        sizes = self.sizes
        common = _common_config(sizes)
        del common["num_hidden_layers"], common["hidden_act"]
        return common | {
            "architectures": ["NemotronHForCausalLM"],
            "model_type": "nemotron_h",
            "hybrid_override_pattern": "*E" * sizes.layers,
            "intermediate_size": sizes.intermediate,
            "mlp_hidden_act": "relu2",
            "n_routed_experts": sizes.experts,
            "n_shared_experts": 1,
            "moe_intermediate_size": sizes.intermediate,
            "moe_shared_expert_intermediate_size": sizes.intermediate,
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "attention_bias": False,
            "mlp_bias": False,
            "max_position_embeddings": 4096,
            "layer_norm_epsilon": 1e-5,
            # Of the Mamba layers that this one leaves out; vLLM wants to know them.
            "mamba_num_heads": 4,
            "mamba_head_dim": 64,
            "ssm_state_size": 16,
            "n_groups": 1,
            "conv_kernel": 4,
        }

    def unquantized_modules(self) -> list[str]:
        modules = ["lm_head"]
        for layer in range(self.sizes.layers):
            first, second = (f"{self.layers_prefix}.{2 * layer + i}.mixer" for i in (0, 1))
            modules += [f"{first}.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
            modules += [f"{second}.gate", f"{second}.shared_experts*"]
        return modules

    def attention(self, layer: int, random: Random) -> Tensors:
        prefix = f"{self.layers_prefix}.{2 * layer}."
        norms = {f"{self.layers_prefix}.{2 * layer + i}.norm.weight": torch.ones(self.sizes.hidden) for i in (0, 1)}
        return norms | _projections(f"{prefix}mixer.", self.sizes, random)

    def router(self, layer: int, gate: Tensor, random: Random) -> Tensors:
        prefix, sizes = f"{self.layers_prefix}.{2 * layer + 1}.mixer", self.sizes
        return {
            f"{prefix}.gate.weight": gate,
            f"{prefix}.gate.e_score_correction_bias": torch.zeros(sizes.experts),
            f"{prefix}.shared_experts.up_proj.weight": random.weight(sizes.intermediate, sizes.hidden, 0.3),
            f"{prefix}.shared_experts.down_proj.weight": random.weight(sizes.hidden, sizes.intermediate, 0.3),
        }

    def experts(self, layer: int, random: Random) -> tuple[Tensors, Tensors]:
        assert self.storage is not None
        sizes = self.sizes

        def projections() -> Iterator[tuple[int, str, Tensor | Drawn]]:
            for expert in range(sizes.experts):
                yield expert, "up_proj", random.expert(sizes.intermediate, sizes.hidden)
                yield expert, "down_proj", random.expert(sizes.hidden, sizes.intermediate, 0.5)

        return store(f"{self.layers_prefix}.{2 * layer + 1}.mixer.experts", projections(), self.storage)


def _bf16(tensors: Tensors) -> Tensors:
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


def _projections(prefix: str, sizes: Sizes, random: Random, *, bias: bool = False) -> Tensors:
    width, kv_width = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    shapes = {
        "q_proj": (width, sizes.hidden, 1.0),
        "k_proj": (kv_width, sizes.hidden, 1.0),
        "v_proj": (kv_width, sizes.hidden, 1.0),
        "o_proj": (sizes.hidden, width, 0.5),
    }
    tensors = {}
    for name, (rows, columns, gain) in shapes.items():
        tensors[f"{prefix}{name}.weight"] = random.weight(rows, columns, gain)
        if bias:
            tensors[f"{prefix}{name}.bias"] = random.normal(rows, std=0.1)
    return tensors


def _with_quantised_linears(
    attention: Tensors, quantise: Callable[[Tensor], tuple[Tensors, Tensor]]
) -> tuple[Tensors, Tensors]:
    """Attention tensors with their projections quantised, and the same dequantised."""
    stored: Tensors = {}
    dense: Tensors = {}
    for name, tensor in attention.items():
        if name.endswith("_proj.weight"):
            parts, dense[name] = quantise(tensor)
            stored |= {f"{name.removesuffix('weight')}{suffix}": part for suffix, part in parts.items()}
        else:
            stored[name] = dense[name] = tensor
    return stored, dense


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
