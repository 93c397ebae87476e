# SPDX-License-Identifier: Apache-2.0
"""Runs every evaluation of this folder on one machine, several engines at a time.

    python -m evals.suite OUT --gsm8k gsm8k_test.jsonl --few-shot gsm8k_train.jsonl
    python -m evals.suite OUT ... --formats mxfp4 nvfp4 mxfp4-fp8 --steps mxfp4 bf16 smoke-512

Steps, each a command of its own whose output is in OUT/logs:

    FORMAT      tinymath's 1,000 problems and the perplexity of their texts, for each of --formats and the dequantised
                weights it is compared with (mxfp4: bf16; nvfp4: nvfp4-bf16; ...-fp8: the same with 16-bit activations)
    load        GSM8K's questions as a load, five-shot, twice: no failed request, the same outputs
    server      the same questions once over HTTP: no failed request
    smoke-512, smoke-1024   evals.capture_smoke

A step that fails does not stop the others. Prints a line a step, then the comparisons, and writes OUT/results.json
after each step. Exits with 1 if a step failed or a comparison is out of bounds: POINTS of accuracy, and of perplexity
PERCENT between a format and its dequantised weights, FP8_PERCENT between 8-bit and 16-bit activations.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evals import gsm8k, weights
from evals.engines import ROOT, VARIANTS, surroundings, variants
from evals.weights import FORMATS

POINTS = 1.5
PERCENT = 0.2
FP8_PERCENT = 1.0
MODEL = ROOT / "evals" / "tinymath" / "model"
FORMAT_NAMES = [f"{name}{end}" for name in FORMATS if name != "bf16" for end in variants(name)]


@dataclass(frozen=True)
class Format:
    """checkpoint: a folder's name. twin: the run it is compared with. percent: what of perplexity may differ."""

    checkpoint: str
    arguments: str = ""
    twin: str | None = None
    percent: float = PERCENT


@dataclass(frozen=True)
class Step:
    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)


def formats(names: list[str]) -> dict[str, Format]:
    """The runs of those formats and of what they are compared with."""
    found: dict[str, Format] = {}
    for name in names:
        base = next(base for base in FORMATS if name.startswith(base))
        arguments = f"--quantization humming {VARIANTS[name.removeprefix(base)]}".strip()
        dense = "bf16" if base == "mxfp4" else f"{base}-bf16"
        if name != base:
            found[name] = Format(base, arguments, base, FP8_PERCENT)
        found.setdefault(base, Format(base, "--quantization humming", dense))
        found.setdefault(dense, Format(dense))
    return found


def checkpoints(model: Path, directory: Path, wanted: dict[str, Format]) -> dict[str, Path]:
    """Writes what is missing of the checkpoints; all are made from the MXFP4 model."""
    paths = {name: directory / name for name in {part.checkpoint for part in wanted.values()}} | {"mxfp4": model}
    for name in sorted(paths, key=len):  # nvfp4 before nvfp4-bf16
        if not (paths[name] / "config.json").exists():
            base, _, dense = name.partition("-")
            weights.convert(paths[base] if dense else model, paths[name], dense or base)
    return paths


def steps(args: argparse.Namespace, paths: dict[str, Path], wanted: dict[str, Format]) -> list[Step]:
    """The longest first."""
    limit = ["--limit", str(args.limit)] if args.limit else []
    out = args.out

    def evaluation(name: str, checkpoint: str, arguments: str, *options: str) -> Step:
        command = [sys.executable, "-m", "evals.gsm8k", str(paths[checkpoint]), *limit, *options]
        command += [f"--arguments={arguments} {args.engine_arguments}", "--out", str(out / f"{name}.json")]
        return Step(name, command)

    found = []
    for size in (1024, 512):
        command = [sys.executable, "-m", "evals.capture_smoke", str(paths["mxfp4"]), "--max-size", str(size)]
        command += [f"--arguments=--quantization humming {args.engine_arguments}", "--out"]
        command += [str(out / f"smoke-{size}.json"), *shlex.split(args.smoke_arguments)]
        found.append(Step(f"smoke-{size}", command))
    questions = ["--task", "gsm8k", "--max-length", "2048", "--concurrency", "256"]
    questions += ["--data", str(args.gsm8k)] if args.gsm8k else []
    questions += ["--few-shot-data", str(args.few_shot)] if args.few_shot else []
    ours = "--quantization humming"
    found.append(evaluation("load", "mxfp4", ours, *questions, "--in-process", "--twice"))
    found.append(evaluation("server", "mxfp4", ours, *questions))
    for name, part in wanted.items():
        both = ["--task", "tinymath", "perplexity", "--max-length", "512", "--in-process"]
        found.append(evaluation(name, part.checkpoint, part.arguments, *both))
    if args.steps:
        unknown = set(args.steps) - {step.name for step in found}
        if unknown:
            raise SystemExit(f"unknown steps {sorted(unknown)}; known: {[step.name for step in found]}")
        found = [step for step in found if step.name in args.steps]
    return found


def run_step(step: Step, out: Path, limit_s: float, environment: dict[str, str]) -> dict[str, Any]:
    """Runs the command, its output in a log; a step has its own cache, so that two starts never write the same."""
    log = out / "logs" / f"{step.name}.log"
    settings = os.environ | environment | {"VLLM_CACHE_ROOT": str(out / "cache" / step.name)} | step.environment
    start = time.monotonic()
    with log.open("wb") as stream:
        process = subprocess.Popen(
            step.command, stdout=stream, stderr=subprocess.STDOUT, env=settings, cwd=ROOT, start_new_session=True
        )
        try:
            code: int | str = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = f"stopped after {limit_s:.0f} s"
        finally:
            end(process)
    lines = log.read_text(errors="replace").splitlines()
    marks = ("[eval]     ", "[smoke]", "capture smoke:")
    said = [line.removeprefix("[eval]     ") for line in lines if line.startswith(marks)]
    record: dict[str, Any] = {"step": step.name, "code": code, "seconds": round(time.monotonic() - start, 1)}
    record["said"] = said[-8:] or lines[-8:]
    path = out / f"{step.name}.json"
    if path.exists():
        record["result"] = json.loads(path.read_text())
        ours = record["result"].get("ours")
        if ours and code == 0 and not ours["layers"] and "humming" in ours["engine"]["arguments"]:
            record["code"] = "no layer ran through vllm_humming"
    return record


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and all that it started, a server in a session of its own too."""
    import psutil

    with contextlib.suppress(psutil.Error):
        family = psutil.Process(process.pid)
        for child in [family, *family.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                child.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what outlived a process that has ended
    process.wait()


def comparisons(results: dict[str, Any], wanted: dict[str, Format]) -> tuple[dict[str, Any], bool]:
    """Compares what was run of the formats with their twins; prints."""
    found: dict[str, Any] = {}
    fine = True
    for name, part in wanted.items():
        twin = part.twin or ""
        ours, theirs = (results.get(key, {}).get("result", {}).get("ours") for key in (name, twin))
        if not ours or not theirs:
            continue
        found[name] = {"against": twin}
        for task, bound in (("tinymath", POINTS), ("perplexity", part.percent)):
            record, distance, line = gsm8k.compared(ours["tasks"][task], theirs["tasks"][task])
            found[name][task] = record
            near = distance <= bound
            fine = fine and near
            print(f"[suite] {name} - {twin}: {task}, {line}{'' if near else '  OUT OF BOUNDS'}", flush=True)
    pair = [results.get(name, {}).get("result", {}).get("ours") for name in ("load", "server")]
    if all(pair):
        left, right = (part["tasks"]["gsm8k"]["outputs"] for part in pair)
        same = sum(a == b for a, b in zip(left, right, strict=True))
        found["server"] = {"same_outputs": same, "problems": len(left)}
        print(f"[suite] server - load: {same} of {len(left)} outputs equal, batches differ", flush=True)
    return found, fine


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m evals.suite", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="directory for results, logs and checkpoints")
    parser.add_argument("--model", type=Path, default=MODEL, help="MXFP4 checkpoint (default: tinymath)")
    parser.add_argument("--gsm8k", type=Path, help="GSM8K's test file (default: from the hub)")
    parser.add_argument("--few-shot", type=Path, help="GSM8K problems for the prompts, with --gsm8k")
    parser.add_argument("--formats", nargs="+", choices=FORMAT_NAMES, default=["mxfp4", "nvfp4"])
    parser.add_argument("--steps", nargs="+", help="only these")
    parser.add_argument("--limit", type=int, help="only the first problems")
    parser.add_argument("--jobs", type=int, default=1, help="engines at a time (default: %(default)s)")
    parser.add_argument("--step-limit", type=float, default=3600, help="seconds (default: %(default)s)")
    parser.add_argument("--engine-arguments", default="", help="of vllm serve, for all engines")
    parser.add_argument("--smoke-arguments", default="", help="of evals.capture_smoke, such as --no-graphs")
    args = parser.parse_args()
    args.out = args.out.absolute()
    for name in ("gsm8k", "few_shot", "model"):
        path = getattr(args, name)
        setattr(args, name, path and path.absolute())
    (args.out / "logs").mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    wanted = formats(args.formats)
    paths = checkpoints(args.model, args.out / "checkpoints", wanted)
    planned = steps(args, paths, wanted)
    print(f"[suite] checkpoints: {time.monotonic() - start:.1f} s", flush=True)
    threads = str(max(1, (os.cpu_count() or 1) // min(args.jobs, len(planned))))
    environment = {"OMP_NUM_THREADS": threads, "TORCHINDUCTOR_COMPILE_THREADS": threads}
    environment |= {"VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if args.jobs > 1:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    summary: dict[str, Any] = surroundings() | {"command": sys.argv[1:], "steps": {}}
    results: dict[str, Any] = summary["steps"]
    lock = threading.Lock()

    def save() -> None:
        with lock:
            (args.out / "results.json").write_text(json.dumps(summary) + "\n")

    fine = True
    with ThreadPoolExecutor(args.jobs) as pool:
        for future in as_completed(
            pool.submit(run_step, step, args.out, args.step_limit, environment) for step in planned
        ):
            record = future.result()
            results[record["step"]] = record
            passed = record["code"] == 0
            fine = fine and passed
            verdict = "ok" if passed else f"FAILED ({record['code']})"
            print(f"[suite] {record['step']}: {verdict}, {record['seconds']:.0f} s", flush=True)
            for line in record["said"]:
                print(f"[suite]     {line}", flush=True)
            save()
    summary["comparisons"], near = comparisons(results, wanted)
    summary["seconds"] = round(time.monotonic() - start, 1)
    save()
    fine = fine and near
    print(f"[suite] {'passed' if fine else 'FAILED'}: {len(results)} steps in {summary['seconds']:.0f} s", flush=True)
    raise SystemExit(0 if fine else 1)


if __name__ == "__main__":
    main()
