# SPDX-License-Identifier: Apache-2.0
"""Qwen3-MoE in plain torch, for training: every expert runs on every token, in two matrix products a layer.

With eight experts that is quicker than sorting tokens: the products are large and there is nothing to gather. The state
dict that `export` gives is the one that transformers' and vLLM's Qwen3MoeForCausalLM load.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vllm_humming.moe.quantize import dequantize_mxfp4, quantize_mxfp4

# The backends that take any mask.
MASKED = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class Sizes:
    """Sizes that the kernels take as they are: two and three blocks of 256 and 128, K of two and three chunks."""

    layers: int = 6
    hidden: int = 256
    intermediate: int = 384
    experts: int = 8
    top_k: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    vocab: int = 1024
    positions: int = 8192
    rope_theta: float = 10000.0
    eps: float = 1e-6

    def config(self, end: int) -> dict[str, Any]:
        """config.json of the model. end: the token that ends a text."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": 4 * self.hidden,
            "moe_intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "attention_bias": False,
            "hidden_act": "silu",
            "max_position_embeddings": self.positions,
            "rms_norm_eps": self.eps,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "eos_token_id": end,
        }


def mxfp4_value(weight: Tensor) -> Tensor:
    """The weight as MXFP4 holds it (groups along the last dimension); the gradient passes as if nothing happened."""
    rows = weight.detach().reshape(-1, weight.shape[-1])
    quantised = dequantize_mxfp4(*quantize_mxfp4(rows), torch.float32).view_as(weight)
    return weight + (quantised - weight).detach()


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, heads, T, D]; cos and sin [B, 1, T, D]."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Cache:
    """Keys and values of one layer. Entries past a row's own length hold what its padding left there."""

    def __init__(self, rows: int, length: int, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> None:
        shape = (2, rows, sizes.kv_heads, length, sizes.head_dim)
        self.keys, self.values = torch.zeros(shape, device=device, dtype=dtype)

    def update(self, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        index = positions[:, None, :, None].expand_as(keys)
        self.keys.scatter_(2, index, keys)
        self.values.scatter_(2, index, values)
        return self.keys, self.values


class Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        width, kv_width = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.input_norm = nn.Parameter(torch.ones(sizes.hidden))
        self.q_norm = nn.Parameter(torch.ones(sizes.head_dim))
        self.k_norm = nn.Parameter(torch.ones(sizes.head_dim))
        self.q = _weight(width, sizes.hidden)
        self.k = _weight(kv_width, sizes.hidden)
        self.v = _weight(kv_width, sizes.hidden)
        self.o = _weight(sizes.hidden, width, 1 / math.sqrt(2 * sizes.layers))
        self.post_norm = nn.Parameter(torch.ones(sizes.hidden))
        self.router = _weight(sizes.experts, sizes.hidden)
        self.gate_up = _weight(sizes.experts, 2, sizes.intermediate, sizes.hidden)
        # [hidden, expert, intermediate]: as a matrix, its product also sums over the experts.
        self.down = _weight(sizes.hidden, sizes.experts, sizes.intermediate, 1 / math.sqrt(2 * sizes.layers))

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: Cache | None,
        positions: Tensor,
        quantised: bool,
    ) -> tuple[Tensor, Tensor]:
        x = x + self._attention(norm(x, self.input_norm, self.sizes.eps), rope, mask, cache, positions)
        out, balance = self._experts(norm(x, self.post_norm, self.sizes.eps), quantised)
        return x + out, balance

    def _attention(
        self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None, cache: Cache | None, positions: Tensor
    ) -> Tensor:
        sizes, (rows, length, _) = self.sizes, x.shape

        def heads(weight: Tensor) -> Tensor:
            return F.linear(x, weight.to(x.dtype)).view(rows, length, -1, sizes.head_dim).transpose(1, 2)

        q = rotate(norm(heads(self.q), self.q_norm, sizes.eps), *rope)
        k = rotate(norm(heads(self.k), self.k_norm, sizes.eps), *rope)
        v = heads(self.v)
        if cache is not None:
            k, v = cache.update(k, v, positions)
        group = sizes.heads // sizes.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        with sdpa_kernel(MASKED):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return F.linear(out.transpose(1, 2).reshape(rows, length, -1), self.o.to(x.dtype))

    def _experts(self, x: Tensor, quantised: bool) -> tuple[Tensor, Tensor]:
        sizes = self.sizes
        probabilities = F.linear(x, self.router.to(x.dtype)).float().softmax(-1)
        values, chosen = probabilities.topk(sizes.top_k, dim=-1)
        weights = torch.zeros_like(probabilities).scatter(-1, chosen, values / values.sum(-1, keepdim=True))
        # Switch Transformer's balance loss: 1 when tokens spread evenly over the experts.
        share = (weights > 0).float().mean((0, 1)) / sizes.top_k
        balance = sizes.experts * (share * probabilities.mean((0, 1))).sum()

        gate_up = mxfp4_value(self.gate_up) if quantised else self.gate_up
        down = mxfp4_value(self.down) if quantised else self.down
        inner = F.linear(x, gate_up.to(x.dtype).view(-1, sizes.hidden))
        gate, up = inner.view(*x.shape[:2], sizes.experts, 2, sizes.intermediate).unbind(-2)
        inner = F.silu(gate) * up * weights.to(x.dtype)[..., None]
        return F.linear(inner.flatten(-2), down.to(x.dtype).view(sizes.hidden, -1)), balance


def _weight(*shape_and_gain: float) -> nn.Parameter:
    """A normal weight of these dimensions; a last float scales it."""
    gain = shape_and_gain[-1] if isinstance(shape_and_gain[-1], float) else 1.0
    shape = [int(size) for size in shape_and_gain if not isinstance(size, float)]
    return nn.Parameter(torch.randn(shape) * (0.5 * gain / math.sqrt(shape[-1])))


class Model(nn.Module):
    """Computes in `dtype`, with parameters in float32."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.sizes, self.dtype = sizes, dtype
        self.embedding = nn.Parameter(torch.randn(sizes.vocab, sizes.hidden) * 0.5)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.Parameter(torch.ones(sizes.hidden))
        self.head = _weight(sizes.vocab, sizes.hidden)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        caches: list[Cache] | None = None,
        quantised: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """tokens, positions [B, T], mask [B, 1, T, keys] (True: seen) -> hidden states and the mean balance loss."""
        half = torch.arange(0, self.sizes.head_dim, 2, device=tokens.device, dtype=torch.float32)
        angles = positions[:, None, :, None] * self.sizes.rope_theta ** (-half / self.sizes.head_dim)
        angles = torch.cat((angles, angles), dim=-1)
        rope = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        x = F.embedding(tokens, self.embedding.to(self.dtype))
        balances = []
        for index, layer in enumerate(self.layers):
            x, balance = layer(x, rope, mask, caches[index] if caches else None, positions, quantised)
            balances.append(balance)
        return norm(x, self.norm, self.sizes.eps), torch.stack(balances).mean()

    def blocks(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head.to(hidden.dtype)).float()

    @torch.no_grad()
    def export(self, quantised: bool = True) -> dict[str, Tensor]:
        """BF16 tensors by the names of Qwen3MoeForCausalLM; the experts' are MXFP4 values if quantised."""
        tensors: dict[str, Tensor] = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        tensors["lm_head.weight"] = self.head
        for index, layer in enumerate(self.blocks()):
            prefix = f"model.layers.{index}."
            names = {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm", "router": "mlp.gate"}
            names |= {name: f"self_attn.{name}_proj" for name in "qkvo"}
            names |= {name: f"self_attn.{name}" for name in ("q_norm", "k_norm")}
            for name, target in names.items():
                tensors[f"{prefix}{target}.weight"] = getattr(layer, name)
            gate_up = mxfp4_value(layer.gate_up) if quantised else layer.gate_up
            down = mxfp4_value(layer.down) if quantised else layer.down
            for expert in range(self.sizes.experts):
                experts = f"{prefix}mlp.experts.{expert}."
                tensors[f"{experts}gate_proj.weight"] = gate_up[expert, 0]
                tensors[f"{experts}up_proj.weight"] = gate_up[expert, 1]
                tensors[f"{experts}down_proj.weight"] = down[:, expert]
        return {name: tensor.detach().bfloat16().cpu().contiguous() for name, tensor in tensors.items()}


def packed_mask(documents: Tensor) -> Tensor:
    """Attention mask [B, 1, T, T] of rows that hold several documents [B, T], numbered: each sees itself, causally."""
    length = documents.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    return ((documents[:, :, None] == documents[:, None, :]) & causal)[:, None]


@torch.inference_mode()
def generate(model: Model, prompts: list[list[int]], end: int, max_tokens: int) -> list[list[int]]:
    """Greedy continuations of the prompts, all in one batch, without `end`."""
    device = model.embedding.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    width = int(lengths.max())
    tokens = torch.tensor([prompt + [end] * (width - len(prompt)) for prompt in prompts], device=device)
    room = -(-(width + max_tokens) // 16) * 16  # attention kernels like keys in sixteens
    caches = [Cache(len(prompts), room, model.sizes, device, model.dtype) for _ in model.layers]
    slots = torch.arange(room, device=device)
    positions = slots[:width].expand_as(tokens)
    # A padded row's surplus keys are never seen: each position is overwritten before the mask reaches it.
    mask = slots[None, None, None, :] <= positions[:, None, :, None]
    hidden, _ = model(tokens, positions, mask, caches)
    hidden = hidden[torch.arange(len(prompts), device=device), lengths - 1]
    finished = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    out = []
    for step in range(max_tokens):
        token = model.logits(hidden).argmax(-1)
        finished |= token == end
        out.append(token.masked_fill(finished, end))
        if step % 8 == 7 and bool(finished.all()):
            break
        positions = (lengths + step)[:, None]
        mask = slots[None, None, None, :] <= positions[:, None, :, None]
        hidden, _ = model(token[:, None], positions, mask, caches)
        hidden = hidden[:, 0]
    rows = torch.stack(out, dim=1).tolist()
    return [row[: row.index(end)] if end in row else row for row in rows]
