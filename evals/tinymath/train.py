# SPDX-License-Identifier: Apache-2.0
"""Trains tinymath and writes it as an MXFP4 checkpoint that vLLM serves.

    python -m evals.tinymath.train OUT --seconds 200     # a few minutes on one GPU
    python -m evals.tinymath.train OUT --steps 20 --rows 4 --layers 2 --hidden 64 --intermediate 64   # a try on a CPU

The second half of the training sees the experts as MXFP4 holds them, so the checkpoint's dequantised weights are the
trained ones. OUT gets the checkpoint (about 11 MB) and training.json: the curve, and the exact match on 1,000 problems
that training never saw, computed in BF16 from the dequantised weights.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import platform
import re
import time
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from evals import weights
from evals.tinymath.batches import Batch, stream
from evals.tinymath.data import Problem, evaluation, prompt
from evals.tinymath.model import Model, Sizes, generate, mxfp4_value, packed_mask
from evals.tinymath.tokenizer import END, build_tokenizer, save_tokenizer

RESULT = re.compile(r"#### (-?[0-9.,]+)")
QUESTION_WEIGHT = 0.2  # of a question's tokens in the loss; an answer's count 1
BALANCE_WEIGHT = 0.01
QUANTISED_FROM = 0.5  # progress after which the experts are seen as MXFP4
EVALUATIONS = (0.3, 0.6, 0.8)  # progress at which the validation problems are asked and the checkpoint is written
WARM_UP = 0.02
MAX_TOKENS = 176  # the longest answer has about 130


def learning_rate(peak: float, progress: float) -> float:
    """Linear warm-up, then a cosine to a hundredth."""
    if progress < WARM_UP:
        return peak * max(progress, WARM_UP / 100) / WARM_UP
    angle = math.pi * min(1.0, (progress - WARM_UP) / (1 - WARM_UP))
    return peak * (0.01 + 0.99 * (1 + math.cos(angle)) / 2)


def optimizer_of(model: Model, peak: float, weight_decay: float) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() > 1 and p is not model.embedding]
    others = [p for p in model.parameters() if p.dim() == 1 or p is model.embedding]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.98), fused=model.embedding.is_cuda)


def loss_of(model: Model, batch: Batch, device: torch.device, quantised: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted cross entropy of the batch's next tokens, and the loss to minimise."""
    tokens, documents, positions, parts = (
        torch.from_numpy(array).to(device, non_blocking=True).long() for array in batch
    )
    hidden, balance = model(tokens, positions, packed_mask(documents), quantised=quantised)
    logits = model.logits(hidden[:, :-1])
    same = documents[:, 1:] == documents[:, :-1]
    parts = parts[:, 1:]
    weight = same * (QUESTION_WEIGHT * (parts == 1) + (parts == 2))
    entropy = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    entropy = (entropy * weight.flatten()).sum() / weight.sum()
    return entropy.detach(), entropy + BALANCE_WEIGHT * balance


@torch.no_grad()
def as_exported(model: Model) -> Model:
    """A copy with the weights that the checkpoint holds: BF16, the experts' MXFP4 values."""
    model = copy.deepcopy(model)
    for layer in model.blocks():
        for parameter in (layer.gate_up, layer.down):
            parameter.copy_(mxfp4_value(parameter))
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    return model


def exact_match(model: Model, tokenizer: Any, problems: list[Problem], batch: int = 512) -> tuple[float, list[str]]:
    """The share of problems whose final answer is right, and the answers."""
    end = tokenizer.token_to_id(END)
    prompts = [tokenizer.encode(prompt(problem.question)).ids for problem in problems]
    rows = []
    for start in range(0, len(prompts), batch):
        rows += generate(model, prompts[start : start + batch], end, MAX_TOKENS)
    answers = [tokenizer.decode(row) for row in rows]
    found = [RESULT.search(answer) for answer in answers]
    right = [match is not None and match[1] == p.result for match, p in zip(found, problems, strict=True)]
    return sum(right) / len(right), answers


def write(out: Path, model: Model, tokenizer: Any) -> int:
    """Writes the MXFP4 checkpoint; returns the bytes of its weights. The stored experts are the trained values."""
    dense = model.export(quantised=True)
    tensors = weights.quantise_experts(dense, "mxfp4")
    for name, tensor in weights.dequantise_experts(tensors).items():
        if not torch.equal(tensor, dense[name]):
            raise AssertionError(f"{name}: the checkpoint does not hold the trained weights")
    size = weights.write(out, model.sizes.config(tokenizer.token_to_id(END)), dense, "mxfp4")
    save_tokenizer(tokenizer, out, model.sizes.positions)
    return size


def train(args: argparse.Namespace, sizes: Sizes) -> dict[str, Any]:
    """Trains, writes checkpoints as it goes, and returns what training.json says."""
    tokenizer = build_tokenizer()
    if tokenizer.get_vocab_size() > sizes.vocab:
        raise ValueError(f"the tokenizer has {tokenizer.get_vocab_size()} tokens, the model {sizes.vocab}")
    problems = evaluation("validation")[: args.validation]
    batches = stream(args.seed, args.rows, args.length, args.workers)
    batch = next(batches)  # forks the workers, before CUDA is used
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    model = Model(sizes).to(device)
    optimizer = optimizer_of(model, args.learning_rate, args.weight_decay)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters / 1e6:.2f} M parameters on {device}, {args.rows * args.length} tokens a step", flush=True)

    record: dict[str, Any] = {"curve": [], "validation": []}
    due = list(EVALUATIONS) if problems else []
    start = time.monotonic()
    step, seen, total = 0, 0, torch.zeros((), device=device)
    while True:
        elapsed = time.monotonic() - start
        progress = step / args.steps if args.steps else elapsed / args.seconds
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args.learning_rate, progress)
        entropy, loss = loss_of(model, batch, device, quantised=progress >= QUANTISED_FROM)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen += int((batch.parts > 0).sum())
        total += entropy
        step += 1
        if step % args.report == 0:  # the only place that waits for the device
            mean = float(total) / args.report
            total.zero_()
            if not math.isfinite(mean):
                raise FloatingPointError(f"the loss is {mean} at step {step}")
            rate = seen / (time.monotonic() - start)
            record["curve"].append({"step": step, "seconds": round(elapsed, 1), "loss": round(mean, 4)})
            print(f"step {step}  {elapsed:.0f} s  {progress:.2f}  loss {mean:.4f}  {rate:.0f} tokens/s", flush=True)
        if due and progress >= due[0]:
            due.pop(0)
            write(args.out, model, tokenizer)
            share, answers = exact_match(as_exported(model), tokenizer, problems)
            record["validation"].append({"step": step, "exact_match": share})
            print(f"step {step}  validation {share:.3f} of {len(problems)} as MXFP4: {answers[0]!r}", flush=True)
        batch = next(batches)
    batches.close()

    record["bytes"] = write(args.out, model, tokenizer)
    record |= {"steps": step, "tokens": seen, "seconds": round(time.monotonic() - start, 1), "parameters": parameters}
    (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    test = evaluation("test")[: args.test]
    share, answers = exact_match(as_exported(model), tokenizer, test)
    record["test"] = {"problems": len(test), "exact_match": share}
    print(f"test: exact match {share:.3f} of {len(test)}; {record['bytes'] / 1e6:.2f} MB of weights", flush=True)
    wrong: dict[str, int] = {}
    for problem, answer in zip(test, answers, strict=True):
        match = RESULT.search(answer)
        if match is None or match[1] != problem.result:
            wrong[problem.key[0]] = wrong.get(problem.key[0], 0) + 1
    record["test"]["wrong"] = dict(sorted(wrong.items(), key=lambda item: -item[1]))
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--seconds", type=float, help="time to train for; the schedule follows the clock")
    length.add_argument("--steps", type=int, help="steps to train for")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=128, help="rows of packed problems in a step")
    parser.add_argument("--length", type=int, default=256, help="tokens in a row")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="that make batches")
    parser.add_argument("--validation", type=int, default=300, help="problems asked on the way")
    parser.add_argument("--test", type=int, default=1000, help="problems asked at the end")
    parser.add_argument("--report", type=int, default=100, help="steps between two lines of output")
    for field in fields(Sizes):
        if field.type == "int":
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=getattr(Sizes(), field.name))
    args = parser.parse_args()
    sizes = replace(
        Sizes(), **{field.name: getattr(args, field.name) for field in fields(Sizes) if field.type == "int"}
    )
    args.out.mkdir(parents=True, exist_ok=True)
    record = train(args, sizes)
    card = torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.machine()
    record |= {"sizes": asdict(sizes), "seed": args.seed, "card": card, "torch": torch.__version__}
    record["learning_rate"] = args.learning_rate
    (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
