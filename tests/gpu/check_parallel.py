#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tensor, expert and data parallel engines on two GPUs beside one GPU, at the sizes of published models.

    python tests/gpu/check_parallel.py OUT [--quick] [--models gpt-oss qwen3 ...] [--runs one tp2 ...] [--jobs N]

Two-layer models with drawn FP4 experts, each in vLLM's engine, all runs at once:

    one     one GPU, the reference
    noise   one GPU with other chunks of prefill, which take other tiles
    control one GPU with one expert less a token: what a lost expert would change (not for all models)
    tp2     tensor parallel      ep2     tensor parallel attention, expert parallel experts
    dp2     data parallel attention, expert parallel experts: two programs, as in vLLM's offline example
    graphs  ep2 with CUDA graphs of decoding

Prompts: a short one by itself (in dp2 the second rank idles after one token), then 16 of 1 to 300 tokens at once. The
logprobs of the prompts' tokens and of greedy ones, and the five best of each position, are compared where both runs
have them. Limits: three times the noise, at least LOGPROB_LIMIT and LOGPROB_MEAN_LIMIT of tests/test_engine.py, which
are for a hidden size of 256 (logits, and BF16's steps with them, grow with its root) and for a BF16 engine beside an
exact one (two of them differ by the root of two more). The control has to be out of bounds.
A line a run; exits with 1 if one failed. Logs, and results.json, are in OUT.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LAYERS = re.compile(r"(\d+) MoE layers? run through vllm_humming \((.*) experts, (kernel|reference) path\)")
LOGPROB_LIMIT, LOGPROB_MEAN_LIMIT, FP8_FACTOR = 0.05, 0.01, 3
NOISE_FACTOR = 3
MAX_TOKENS = 8
WRITE_LIMIT_S = 60
FIRST_PORT = 20000  # below those that systems give out; 200 a run
LENGTHS = (1, 300, 2, 3, 144, 5, 8, 233, 13, 21, 64, 34, 7, 55, 89, 129)


@dataclass(frozen=True)
class Model:
    kind: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    fp8: bool = False

    @property
    def architecture(self) -> tuple[str, str]:
        """vLLM's module and class."""
        if self.kind.startswith("gpt-oss"):
            return "gpt_oss", "GptOssForCausalLM"
        return "qwen3_moe", "Qwen3MoeForCausalLM"

    @property
    def checkpoint(self) -> str:
        return f"{self.kind}-{self.hidden}-{self.intermediate}-{self.experts}"


MODELS = {
    "gpt-oss": Model("gpt-oss-mxfp4", 2880, 2880, 32, 4),
    "qwen3": Model("qwen3-mxfp4", 2048, 768, 128, 8),
    "e256": Model("qwen3-mxfp4", 1024, 512, 256, 8),
    "qwen3-nvfp4": Model("qwen3-nvfp4", 2048, 768, 128, 8),
    "qwen3-fp8": Model("qwen3-mxfp4", 2048, 768, 128, 8, fp8=True),
    "tiny": Model("qwen3-mxfp4", 256, 128, 32, 4),  # for a CPU
}
QUICK = ("gpt-oss", "qwen3", "e256")
CONTROLS_OF = (*QUICK, "tiny")
RUNS = ("one", "noise", "control", "tp2", "ep2", "dp2", "graphs")
GRAPHS_OF = ("e256", "tiny")


@dataclass
class Run:
    """One engine, in a program of its own, or one a data parallel rank."""

    model: str
    name: str
    arguments: dict[str, Any]
    gpus: str
    ranks: int = 1
    number: int = 0
    seconds: float = 0.0
    problem: str | None = None
    log: str = ""
    result: Any = None

    @property
    def label(self) -> str:
        return f"{self.model}-{self.name}"


# In a process of its own


def prompts() -> list[list[list[int]]]:
    """Batches of prompts. The models' successors cover at least 257 tokens; the first is the end."""
    source = random.Random(0)
    return [[[source.randrange(1, 256) for _ in range(length)] for length in lengths] for lengths in ((11,), LENGTHS)]


def generate(arguments: dict[str, Any], rank: int, ranks: int, meet: Path) -> list[list[dict[str, Any]]]:
    """Of each batch what this rank did of it: prompt i runs on rank i % ranks."""
    from vllm import LLM, SamplingParams

    llm = LLM(**arguments)
    answers = []
    for number, batch in enumerate(prompts()):
        mine = batch[rank::ranks]
        tokens = MAX_TOKENS if mine else 1  # a rank without a prompt has to begin with the others, then idles
        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=5, prompt_logprobs=5, detokenize=False
        )
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in mine or [[7]]], sampling, use_tqdm=False)

        def plain(positions: Any) -> list[dict[int, float]]:
            return [{token: entry.logprob for token, entry in (position or {}).items()} for position in positions]

        found = [
            {
                "tokens": list(output.outputs[0].token_ids),
                "logprobs": plain(output.outputs[0].logprobs),
                "prompt_logprobs": plain(output.prompt_logprobs),
            }
            for output in outputs
        ]
        answers.append(found if mine else [])
        (meet / f"{number}-{rank}").touch()
        while not all((meet / f"{number}-{other}").exists() for other in range(ranks)):
            time.sleep(0.05)
    return answers


def work(path: Path) -> None:
    """Runs the engine of a request once its checkpoint is there."""
    request = json.loads(path.read_text())
    # Takes seconds, in which the checkpoint is written. A class that is registered needs no process to inspect it.
    from vllm import ModelRegistry
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    module, name = request["architecture"]
    ModelRegistry.register_model(name, getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), name))
    start = time.monotonic()
    while not Path(request["ready"]).exists():
        if time.monotonic() - start > WRITE_LIMIT_S:
            raise RuntimeError(f"no checkpoint after {WRITE_LIMIT_S} s")
        time.sleep(0.1)
    print(f"[parallel] waited {time.monotonic() - start:.1f} s for the checkpoint", flush=True)
    answers = generate(request["arguments"], request["rank"], request["ranks"], Path(request["meet"]))
    Path(request["out"]).write_text(json.dumps(answers))
    print("[parallel] wrote the results", flush=True)
    os._exit(0)  # what started this ends the processes of the engine


def write(name: str, directory: Path) -> None:
    sys.path.insert(0, str(ROOT))
    from dataclasses import replace

    from vllm_humming.checkpoints import DEFAULT_SIZES, write_checkpoint

    model = MODELS[name]
    sizes = replace(
        DEFAULT_SIZES[model.kind],
        hidden=model.hidden,
        intermediate=model.intermediate,
        experts=model.experts,
        top_k=model.top_k,
    )
    write_checkpoint(directory, model.kind, sizes=sizes, drawn=True)
    (directory / "ready").touch()


# In the program itself


def planned(args: argparse.Namespace, checkpoints: Path) -> list[Run]:
    common: dict[str, Any] = {
        "quantization": "humming",
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": False,
        "seed": 0,
    }
    if args.device == "cuda":
        # Several engines share a card: nothing looks at its memory, and NCCL is all that connects two of them.
        common |= {"gpu_memory_utilization": 0.04, "kv_cache_memory_bytes": 1 << 30, "disable_custom_all_reduce": True}
    graphs = {
        "enforce_eager": False,
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16],
        },
    }
    tp2 = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    expert = {"enable_expert_parallel": True}
    runs = []
    for index, name in enumerate(args.models):
        model = MODELS[name]
        own: dict[str, Any] = {"model": str(checkpoints / model.checkpoint)}
        if model.fp8:
            own["additional_config"] = {"humming": {"activation": "fp8"}}
        own = common | own
        given = json.loads(args.engine_arguments)
        single = {"distributed_executor_backend": "uni"}
        control = {"hf_overrides": {"num_experts_per_tok": model.top_k - 1}}
        both = ",".join(args.gpus)
        card = args.gpus[index % len(args.gpus)]
        variants: dict[str, tuple[dict[str, Any], str, int]] = {
            "one": (single, card, 1),
            "tp2": (tp2, both, 1),
            "ep2": (tp2 | expert, both, 1),
            "dp2": (single | expert, both, 2),
            "noise": (single | {"max_num_batched_tokens": 256}, card, 1),
        }
        if name in CONTROLS_OF:
            variants["control"] = single | control, card, 1
        if name in GRAPHS_OF and args.device == "cuda":
            variants["graphs"] = tp2 | expert | graphs, both, 1
        for run, (arguments, gpus, ranks) in variants.items():
            if run in args.runs:
                runs.append(Run(name, run, own | arguments | given, gpus, ranks, len(runs)))
    return runs


def environment(args: argparse.Namespace, run: Run, rank: int) -> dict[str, str]:
    port = FIRST_PORT + 200 * run.number
    settings = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_PORT": str(port + 40 * rank),
        "MASTER_PORT": str(port + 150),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(args.scratch / "cache" / f"{run.label}-{rank}"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        # NVLink multicast stays off: NCCL's, and the all-reduces of vLLM that use it.
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    }
    if args.device == "cuda":
        settings["CUDA_VISIBLE_DEVICES"] = run.gpus
    else:
        settings |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if run.ranks > 1:
        settings |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",  # the loop that keeps idle ranks in step is that of this process
            "VLLM_DP_RANK": str(rank),
            "VLLM_DP_RANK_LOCAL": str(rank),
            "VLLM_DP_SIZE": str(run.ranks),
            "VLLM_DP_MASTER_IP": "127.0.0.1",
            "VLLM_DP_MASTER_PORT": str(port + 100),
        }
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | settings | {"PYTHONPATH": os.pathsep.join(path)}


def execute(args: argparse.Namespace, run: Run, checkpoints: Path) -> Run:
    """Runs to the end, or to the limit; fills in results, log and problem."""
    start = time.monotonic()
    processes: list[subprocess.Popen[bytes]] = []
    logs = [args.out / "logs" / f"{run.label}{f'-{rank}' if run.ranks > 1 else ''}.log" for rank in range(run.ranks)]
    outs = [args.scratch / f"{run.label}-{rank}.json" for rank in range(run.ranks)]
    meet = args.scratch / "meet" / run.label
    meet.mkdir(parents=True)
    try:
        for rank, log in enumerate(logs):
            ready = checkpoints / MODELS[run.model].checkpoint / "ready"
            request = {"arguments": run.arguments, "rank": rank, "ranks": run.ranks}
            request["architecture"] = MODELS[run.model].architecture
            request |= {"out": str(outs[rank]), "ready": str(ready), "meet": str(meet)}
            path = args.scratch / f"{run.label}-{rank}.request.json"
            path.write_text(json.dumps(request))
            command = [sys.executable, str(Path(__file__).resolve()), "--work", str(path)]
            with log.open("wb") as stream:
                processes.append(
                    subprocess.Popen(
                        command,
                        stdout=stream,
                        stderr=subprocess.STDOUT,
                        stdin=subprocess.DEVNULL,
                        env=environment(args, run, rank),
                        start_new_session=True,
                    )
                )
        while any(process.poll() is None for process in processes):
            if time.monotonic() - start > args.limit:
                run.problem = f"stopped after {args.limit:.0f} s"
                break
            if any(process.poll() for process in processes):  # its peers wait for ever
                break
            time.sleep(0.1)
        codes = [process.poll() for process in processes]
        if any(codes):
            run.problem = f"exit codes {codes}"
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    run.seconds = time.monotonic() - start
    run.log = "".join(log.read_text(errors="replace") for log in logs)
    if not run.problem:
        parts = [json.loads(out.read_text()) for out in outs]
        run.result = [_joined(batch) for batch in zip(*parts, strict=True)]
    return run


def _joined(parts: tuple[list[Any], ...]) -> list[Any]:
    """What the ranks did of a batch, in its order."""
    longest = max(len(part) for part in parts)
    return [part[i] for i in range(longest) for part in parts if i < len(part)]


@dataclass(frozen=True)
class Difference:
    largest: float
    mean: float
    tail: float  # the 99th percentile
    count: int
    same_tokens: int
    tokens: int

    def __str__(self) -> str:
        values = f"max {self.largest:.4f}, 99% {self.tail:.4f}, mean {self.mean:.5f} of {self.count}"
        return f"{values}, tokens {self.same_tokens}/{self.tokens}"


def difference(left: list[Any], right: list[Any]) -> Difference:
    """Of all logprobs that both have; sampled ones up to and with the first token that differs."""
    found: list[float] = []
    same = tokens = 0
    for left_batch, right_batch in zip(left, right, strict=True):
        for a, b in zip(left_batch, right_batch, strict=True):
            pairs = list(zip(a["prompt_logprobs"], b["prompt_logprobs"], strict=True))
            agree = [x == y for x, y in zip(a["tokens"], b["tokens"], strict=True)]
            same, tokens = same + sum(agree), tokens + len(agree)
            until = agree.index(False) + 1 if False in agree else len(agree)
            pairs += list(zip(a["logprobs"], b["logprobs"], strict=True))[:until]
            for x, y in pairs:
                # A token that one run has among its five best and the other has not is near the fifth in both.
                both = x.keys() & y.keys()
                if x and not both:
                    return Difference(math.inf, math.inf, math.inf, 0, same, tokens)
                found += [abs(x[token] - y[token]) for token in both]
    if not found or any(math.isnan(value) for value in found):
        return Difference(math.inf, math.inf, math.inf, len(found), same, tokens)
    found.sort()
    return Difference(found[-1], sum(found) / len(found), found[int(0.99 * (len(found) - 1))], len(found), same, tokens)


def layers_problem(run: Run, device: str) -> str | None:
    """What is wrong with what the log says of our layers: each worker has two, in FP8 where asked for."""
    lines = LAYERS.findall(run.log)
    path = "kernel" if device == "cuda" else "reference"
    found = {(line[0], "x FP8" in line[1], line[2]) for line in lines}
    workers = run.ranks * run.arguments.get("tensor_parallel_size", 1)
    if found != {("2", MODELS[run.model].fp8, path)} or len(lines) != workers:
        return f"layers that ran through vllm_humming, in {workers} workers: {lines}"
    return None


def judged(args: argparse.Namespace, model: str, runs: dict[str, Run]) -> list[tuple[str, bool, str]]:
    """(run, whether it is fine, its line) of the finished runs of a model."""
    lines = []
    results = {name: run.result for name, run in runs.items() if run.result is not None}
    reference = results.get("one")
    noise = difference(reference, results["noise"]) if reference and "noise" in results else None
    sizes = MODELS[model]
    scale = math.sqrt(2 * sizes.hidden / 256) * (FP8_FACTOR if sizes.fp8 else 1)
    largest = max(LOGPROB_LIMIT * scale, NOISE_FACTOR * noise.largest if noise else 0)
    mean = max(LOGPROB_MEAN_LIMIT * scale, NOISE_FACTOR * noise.mean if noise else 0)
    for name, run in runs.items():
        problem = run.problem or layers_problem(run, args.device)
        if run.problem:
            tail = [line for line in run.log.splitlines() if re.search(r"Error|error:|assert", line)][-3:]
            problem = "; ".join([run.problem, *tail])
        elif not problem and reference is None:
            problem = "no reference"
        if problem or name == "one":
            lines.append((name, not problem, problem or f"{run.seconds:.0f} s"))
            continue
        found = difference(reference, run.result)
        near = found.largest <= largest and found.mean <= mean
        limits = f" (limits {largest:.3f}, mean {mean:.4f})"
        if name == "control":
            fine, limits = not near, f"{limits}{'  TOO NEAR' if near else ''}"
        elif name == "noise":
            fine, limits = math.isfinite(found.largest), ""
        else:
            fine, limits = near, f"{limits}{'' if near else '  OUT OF BOUNDS'}"
        lines.append((name, fine, f"{found}{limits}, {run.seconds:.0f} s"))
    return lines


def main() -> int:
    if sys.argv[1:2] == ["--work"]:
        work(Path(sys.argv[2]))
    if sys.argv[1:2] == ["--write"]:
        write(sys.argv[2], Path(sys.argv[3]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory for logs and results.json")
    parser.add_argument("--gpus", nargs=2, default=["0", "1"], help="the two cards (default: 0 1)")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), help="default: all but tiny")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), help="without one, nothing is compared")
    parser.add_argument("--jobs", type=int, default=64, help="runs at a time (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=100, help="seconds a run (default: %(default)s)")
    parser.add_argument("--engine-arguments", default="{}", help="of LLM, as a JSON object, for all engines")
    args = parser.parse_args()
    if args.models is None:
        args.models = list(QUICK) if args.quick else [name for name in MODELS if name != "tiny"]
    args.out = args.out.absolute()
    (args.out / "logs").mkdir(parents=True, exist_ok=True)
    args.scratch = Path(tempfile.mkdtemp(prefix="parallel-"))
    start = time.monotonic()
    checkpoints = args.scratch / "checkpoints"
    runs = planned(args, checkpoints)
    by_checkpoint = {MODELS[name].checkpoint: name for name in args.models}
    print(f"[parallel] {len(runs)} runs of {len(args.models)} models, {args.device}", flush=True)
    record: dict[str, Any] = {"command": sys.argv[1:], "lines": {}}
    writers = []
    failures = checked = 0
    try:
        for checkpoint, name in by_checkpoint.items():
            command = [sys.executable, str(Path(__file__).resolve()), "--write", name, str(checkpoints / checkpoint)]
            with (args.out / "logs" / f"write-{checkpoint}.log").open("wb") as stream:
                settings = os.environ | {"OMP_NUM_THREADS": "2"}
                writers.append(subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=settings))
        finished: dict[str, dict[str, Run]] = {name: {} for name in args.models}
        with ThreadPoolExecutor(min(args.jobs, len(runs))) as pool:
            for future in as_completed([pool.submit(execute, args, run, checkpoints) for run in runs]):
                run = future.result()
                finished[run.model][run.name] = run
                note = run.problem or "done"
                print(f"[parallel] {run.label}: {note}, {run.seconds:.0f} s", flush=True)
                if run.problem:
                    print(run.log[-1500:], flush=True)
                if len(finished[run.model]) < sum(other.model == run.model for other in runs):
                    continue
                ordered = {name: finished[run.model][name] for name in RUNS if name in finished[run.model]}
                for name, fine, line in judged(args, run.model, ordered):
                    print(f"[parallel] {run.model} {name}: {'ok' if fine else 'FAILED'}: {line}", flush=True)
                    record["lines"].setdefault(run.model, []).append([name, fine, line])
                    failures, checked = failures + (not fine), checked + 1
                (args.out / "results.json").write_text(json.dumps(record, indent=1) + "\n")
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
        shutil.rmtree(args.scratch, ignore_errors=True)
    verdict = "FAILED" if failures or not checked else "passed"
    print(f"[parallel] {verdict}: {failures} failures of {checked} in {time.monotonic() - start:.0f} s", flush=True)
    return 1 if failures or not checked else 0


if __name__ == "__main__":
    sys.exit(main())
