# SPDX-License-Identifier: Apache-2.0
"""Decode and prefill rates of the whole engine on dummy weights.

usage: engine.py MODEL_DIR '{"LLM argument": value, ...}' OUT.jsonl LABEL [LOCK ENGINES]
       engine.py --config DIR    write a config.json of Qwen3-30B-A3B's sizes with MXFP4 experts
MODEL_DIR needs a config.json only. Each batch size: prompts of 128 random tokens, 64 decode steps, ignore_eos, CUDA
graphs on; the time of the steps is the difference to the same batch with one new token. Then a prefill-only case. Then
what the GPU did in such steps, by torch's profiler. Set VLLM_MOE_ROUTING_SIMULATION_STRATEGY=uniform_random: dummy
weights route degenerately. With LOCK, a file, the rates are measured once ENGINES engines have loaded, while holding
its lock: they start at once and are measured in turn.
"""

import fcntl
import gzip
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TextIO

STEPS = 64
PROFILED_STEPS = 8
# Whose a kernel is, by its name; the first that fits. Every layer of this model has experts, so activations are theirs.
OWNERS = {
    "experts": r"vllm_humming|humming|marlin|moe|experts|topk|silu|act_and_mul",
    "attention": r"flash|fmha|attn|attention|reshape_and_cache|prepare_varlen",
    "linears": r"nvjet|gemm|cutlass|cublas|splitK",
}
QWEN3_30B_A3B = dict(
    architectures=["Qwen3MoeForCausalLM"],
    model_type="qwen3_moe",
    hidden_size=2048,
    intermediate_size=6144,
    moe_intermediate_size=768,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[],
    vocab_size=151936,
    max_position_embeddings=40960,
    rope_theta=1000000.0,
    rms_norm_eps=1e-6,
    hidden_act="silu",
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    attention_bias=False,
    bos_token_id=151643,
    eos_token_id=151645,
)


def write_config(directory: Path) -> None:
    """Writes DIRECTORY/config.json: Qwen3-30B-A3B with MXFP4 experts as compressed-tensors writes them."""
    weights = dict(num_bits=4, type="float", symmetric=True, dynamic=False, strategy="group", group_size=32)
    layout = "mxfp4-pack-quantized"
    group = dict(targets=["Linear"], format=layout, weights=weights, input_activations=None, output_activations=None)
    quantization = dict(
        quant_method="compressed-tensors",
        format=layout,
        quantization_status="compressed",
        ignore=["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
        config_groups=dict(group_0=group),
    )
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(QWEN3_30B_A3B | dict(quantization_config=quantization), indent=2))


def best_seconds(llm, rng: random.Random, requests: int, prompt_tokens: int, new_tokens: int) -> float:
    """The best of three batches of fresh random prompts, after one to warm up."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    times = []
    for _ in range(1 + 3):
        prompts = [
            {"prompt_token_ids": [rng.randrange(10, 150000) for _ in range(prompt_tokens)]} for _ in range(requests)
        ]
        start = time.time()
        llm.generate(prompts, sampling, use_tqdm=False)
        times.append(time.time() - start)
    return min(times[1:])


def rates(llm) -> Iterator[dict]:
    """One record a decode batch size, then one of prefill."""
    rng = random.Random(0)
    for batch in (1, 8, 32, 128, 256):
        first = best_seconds(llm, rng, batch, 128, 1)
        decode = best_seconds(llm, rng, batch, 128, 1 + STEPS) - first
        yield dict(
            kind="decode",
            batch=batch,
            tok_s=round(batch * STEPS / decode, 1),
            itl_ms=round(decode / STEPS * 1e3, 3),
        )
    tokens = 16 * 2048
    yield dict(kind="prefill", tokens=tokens, tok_s=round(tokens / best_seconds(llm, rng, 16, 2048, 1)))


def owner(kernel: str) -> str:
    for name, pattern in OWNERS.items():
        if re.search(pattern, kernel, re.IGNORECASE):
            return name
    return "other"


def times_by_owner(kernels: Iterable[tuple[str, float, float]]) -> Counter:
    """Seconds of (name, start, end), in seconds, by owner.

    Kernels that overlap are not counted twice: one has the time from the end of the kernel that ended before it. With
    programmatic dependent launch a kernel starts early, and waits.
    """
    times: Counter = Counter()
    last = float("-inf")
    for name, start, end in sorted(kernels, key=lambda kernel: kernel[2]):
        times[owner(name)] += end - max(start, last)
        last = end
    return times


def kernels_of(trace: dict) -> list[tuple[str, float, float]]:
    """(name, start, end) in seconds of the kernels and copies in a trace of torch's profiler."""
    return [
        (event["name"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
        for event in trace["traceEvents"]
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]


def split(llm, directory: Path) -> Iterator[dict]:
    """Milliseconds of the GPU by owner: in a step of each decode batch size, then in the prefill-only case."""
    from vllm import SamplingParams

    rng = random.Random(1)

    def profiled(requests: int, prompt_tokens: int, new_tokens: int) -> Counter:
        sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        prompts = [
            {"prompt_token_ids": [rng.randrange(10, 150000) for _ in range(prompt_tokens)]} for _ in range(requests)
        ]
        known = set(directory.iterdir())
        llm.start_profile()
        llm.generate(prompts, sampling, use_tqdm=False)
        llm.stop_profile()
        (path,) = [path for path in directory.iterdir() if path not in known and path.name.endswith(".json.gz")]
        with gzip.open(path) as file:
            return times_by_owner(kernels_of(json.load(file)))

    def record(times: Counter, steps: int) -> dict:
        spent = {name: round(times[name] / steps * 1e3, 3) for name in (*OWNERS, "other")}
        return {f"{name}_ms": value for name, value in spent.items()} | {"gpu_ms": round(sum(spent.values()), 3)}

    for batch in (1, 32, 256):
        first, all_steps = profiled(batch, 128, 1), profiled(batch, 128, 1 + PROFILED_STEPS)
        all_steps.subtract(first)
        yield dict(kind="decode-split", batch=batch) | record(all_steps, PROFILED_STEPS)
    yield dict(kind="prefill-split", tokens=16 * 2048) | record(profiled(16, 2048, 1), 1)


def wait_for_others(lock: TextIO, engines: int) -> None:
    """Returns, holding the lock, when as many engines have come here; the lock file has a line for each."""
    print(os.getpid(), file=lock, flush=True)
    while len(Path(lock.name).read_text().splitlines()) < engines:
        time.sleep(0.2)
    fcntl.flock(lock, fcntl.LOCK_EX)


def main() -> int:
    if sys.argv[1:2] == ["--config"] and len(sys.argv) == 3:
        write_config(Path(sys.argv[2]))
        return 0
    if len(sys.argv) not in (5, 7):
        print(__doc__, file=sys.stderr)
        return 2
    model, options, path, label, *lock = sys.argv[1:]
    from vllm import LLM

    arguments = dict(
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=4096,
        gpu_memory_utilization=0.85,
        seed=0,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
    )
    with (
        open(path, "a") as out,
        open(lock[0] if lock else os.devnull, "a") as turn,
        tempfile.TemporaryDirectory() as traces,
    ):
        arguments["profiler_config"] = dict(
            profiler="torch",
            torch_profiler_dir=traces,
            torch_profiler_with_stack=False,
            torch_profiler_dump_cuda_time_total=False,
        )
        start = time.time()
        llm = LLM(model=model, **arguments | json.loads(options))
        print("LOAD", round(time.time() - start, 1), flush=True)
        if lock:
            wait_for_others(turn, int(lock[1]))
        for record in chain(rates(llm), split(llm, Path(traces))):
            line = json.dumps(dict(label=label) | record)
            print(line, flush=True)
            out.write(line + "\n")
            out.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
