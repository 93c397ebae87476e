# SPDX-License-Identifier: Apache-2.0
"""Checks that every configured CUDA graph size was captured with our kernels inside and gives the eager run's tokens.

    python -m evals.capture_smoke MODEL
    python -m evals.capture_smoke openai/gpt-oss-20b --max-size 1024 --data questions.jsonl

Starts the engine with full and piecewise graphs, then, for every size: one prompt of that many tokens (a piecewise
graph) and that many prompts decoding at once (a full graph), under torch's profiler, which must see our kernels and no
call of our operator outside a graph. After that 128 questions arrive in bursts; outputs must be valid, nothing may be
compiled or captured, and the allocator may not grow. An eager engine then answers the same batches. Where a token
differs, the eager run must have had the other token within --tie nats: sums are rounded in another order there, so a
tie may fall either way (BF16 logits between 16 and 32 are 0.125 apart, and each of two may move by one step); from that
token on the two texts are no longer compared.

Prints one summary line; exits with 0 if all checks passed, 1 if one failed, 3 if the platform has no CUDA graphs
(--no-graphs checks the rest there).
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evals.engines import apart, keyword_arguments, run_inside, surroundings
from evals.tasks import documents
from evals.tinymath.data import evaluation, prompt

OURS = "vllm_humming"
DECODED = 6  # tokens of each prompt in a batch of one size
WAVES = 3
PROFILED = 2  # decode steps of each size under the profiler
BURST_TOKENS = 96

# Tokens kept of each position: a question cut short before a number has as many equally good ones as there are digits.
BEST = 16

Top = dict[int, float]  # token -> logprob, the BEST best


@dataclass
class Answer:
    """One greedy output. tops: the best tokens at each position. reason: why it ended."""

    tokens: list[int]
    tops: list[Top]
    reason: str | None

    def invalid(self, vocabulary: int) -> bool:
        numbers = [logprob for top in self.tops for logprob in top.values()]
        known = all(0 <= token < vocabulary for token in self.tokens)
        return not (self.tokens and known and self.reason in ("stop", "length") and all(map(math.isfinite, numbers)))


@dataclass
class Report:
    """What one engine gave. batches: answers by the batch's name. problems: failed checks, in words."""

    sizes: list[int] = field(default_factory=list)
    batches: dict[str, list[Answer]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    captured: dict[str, list[int]] = field(default_factory=dict)
    layers: int = 0
    vocabulary: int = 0
    reserved: list[int] = field(default_factory=list)


def first_difference(graph: Answer, eager: Answer, tie: float) -> str | None:
    """None if the tokens agree up to a tie of the eager run, else where they part."""
    for position, (ours, theirs) in enumerate(zip(graph.tokens, eager.tokens, strict=False)):
        if ours != theirs:
            top = eager.tops[position]
            if ours in top and top[theirs] - top[ours] <= tie:
                return None
            gap = f"{top[theirs] - top[ours]:.3f} nats" if ours in top else f"not among the {BEST} best"
            return f"position {position}: token {ours} instead of {theirs} ({gap})"
    return None if len(graph.tokens) == len(eager.tokens) else "lengths differ"


def compare(graph: Report, eager: Report, tie: float) -> tuple[int, int, list[str]]:
    """(answers that are equal, answers in all, differences that no tie explains)."""
    equal, total, problems = 0, 0, []
    for name, answers in graph.batches.items():
        for index, (ours, theirs) in enumerate(zip(answers, eager.batches[name], strict=True)):
            total += 1
            equal += ours.tokens == theirs.tokens
            difference = first_difference(ours, theirs, tie)
            if difference:
                problems.append(f"{name}, prompt {index}, {difference}")
    return equal, total, problems


def missing_sizes(captured: dict[str, list[int]], configured: Iterable[int]) -> list[str]:
    """Which configured sizes have no graph, by mode."""
    found = []
    for mode in ("FULL", "PIECEWISE"):
        missing = sorted(set(configured) - set(captured.get(mode, ())))
        if missing:
            found.append(f"no {mode} graph of sizes {missing}")
    return found


def captured_sizes() -> dict[str, list[int]]:
    """Sizes of the CUDA graphs in this process, by mode; of piecewise ones those that every piece has."""
    full: set[int] = set()
    pieces: list[set[int]] = []
    for item in live_objects():
        kind = type(item).__name__
        if kind == "CUDAGraphWrapper":
            # One whose start failed (vLLM makes some on machines without CUDA) has no entries.
            entries = getattr(item, "concrete_cudagraph_entries", {})
            sizes = {key.num_tokens for key, entry in entries.items() if entry.cudagraph is not None}
            if not sizes:
                continue
            if item.runtime_mode.name == "FULL":
                full |= sizes
            else:
                pieces.append(sizes)
        elif kind.endswith("CudaGraphManager") and isinstance(getattr(item, "graphs", None), dict):
            full |= {key.num_tokens for key in item.graphs if key.cg_mode.name == "FULL"}
            partly = {key.num_tokens for key in item.graphs if key.cg_mode.name == "PIECEWISE"}
            if partly:
                pieces.append(partly)
    return {"FULL": sorted(full), "PIECEWISE": sorted(set.intersection(*pieces)) if pieces else []}


def our_layers() -> int:
    """The MoE layers in this process that run through this package."""
    import torch

    methods = [getattr(item, "quant_method", None) for item in live_objects() if isinstance(item, torch.nn.Module)]
    # A layer's parts may share its method.
    return len({id(method) for method in methods if f"{type(method).__module__}.".startswith(f"{OURS}.moe.")})


def live_objects() -> list[Any]:
    """All objects that the collector knows; vLLM hides those of its start from it."""
    gc.unfreeze()
    return gc.get_objects()


class Driver:
    """An engine inside this process, stepped by hand."""

    def __init__(self, args: argparse.Namespace, graphs: bool) -> None:
        run_inside()
        from vllm import LLM, SamplingParams

        options: dict[str, Any] = {
            "max_model_len": args.max_model_len,
            "max_num_seqs": args.max_size,
            # All prompts of the largest batch start in one step: no one is done before the last has started.
            "max_num_batched_tokens": max(args.max_size * args.prompt_tokens, args.max_model_len),
            "enable_prefix_caching": False,
            "async_scheduling": False,
        } | keyword_arguments(args.arguments)
        if graphs:
            options["compilation_config"] = {
                "cudagraph_mode": "FULL_AND_PIECEWISE",
                "max_cudagraph_capture_size": args.max_size,
            }
        else:
            options["enforce_eager"] = True
        self.llm = LLM(model=args.model, **options)
        self.engine = self.llm.llm_engine
        self.params = SamplingParams
        self.count = 0

    def add(self, tokens: list[int], max_tokens: int, ignore_eos: bool = True) -> str:
        self.count += 1
        name = str(self.count)
        params = self.params(temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos, logprobs=BEST)
        self.engine.add_request(name, {"prompt_token_ids": tokens}, params)
        return name

    def step(self, answers: dict[str, Answer]) -> None:
        """One step; finished requests go to answers."""
        for output in self.engine.step():
            if output.finished:
                best = output.outputs[0]
                tops = [{token: entry.logprob for token, entry in position.items()} for position in best.logprobs or ()]
                # vLLM may append its own suffix to a request's name.
                answers[output.request_id.split("-")[0]] = Answer(list(best.token_ids), tops, best.finish_reason)

    def finish(self, answers: dict[str, Answer]) -> None:
        while self.engine.has_unfinished_requests():
            self.step(answers)

    def batch(self, prompts: list[list[int]], max_tokens: int, profiled: int = 0) -> tuple[list[Answer], Any]:
        """Answers of prompts that start together, and the profile of `profiled` steps after all have started."""
        answers: dict[str, Answer] = {}
        names = [self.add(tokens, max_tokens) for tokens in prompts]
        profile = None
        if profiled:
            if max_tokens > 1:
                self.step(answers)  # the prompts
            profile = self._profile(answers, profiled)
        self.finish(answers)
        return [answers[name] for name in names], profile

    def _profile(self, answers: dict[str, Answer], steps: int) -> Any:
        import torch

        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(steps):
                self.step(answers)
            torch.cuda.synchronize()
        return profile


def judge_profile(events: Iterable[tuple[str, bool]], layers: int, steps: int) -> str | None:
    """What is wrong with the (name, on the device) events of graph replays, or None.

    Our kernels must run, at least one a layer and step, and our operator must not be called: a graph holds it.
    """
    kernels = calls = 0
    for name, on_device in events:
        if OURS in name:
            kernels += on_device
            calls += not on_device
    if calls:
        return f"{calls} calls of {OURS} outside a graph"
    if kernels < layers * steps:
        return f"{kernels} kernels of {OURS} in {steps} steps of {layers} layers"
    return None


def events_of(profile: Any) -> list[tuple[str, bool]]:
    return [(event.name, "CUDA" in str(event.device_type)) for event in profile.events()]


def prompts_of(args: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    """Token ids of real questions, short enough for many at a time."""
    if args.data:
        texts = documents(args.data)
    else:
        texts = [prompt(problem.question) for problem in evaluation("test") + evaluation("validation")]
    return [tokenizer.encode(text)[: args.prompt_tokens] for text in texts]


def cut(prompts: list[list[int]], size: int) -> list[int]:
    """One prompt of exactly `size` tokens, from the questions in a row."""
    tokens: list[int] = []
    while len(tokens) < size:
        for item in prompts:
            tokens += item
            if len(tokens) >= size:
                break
    return tokens[:size]


def run(args: argparse.Namespace, graphs: bool, sizes: list[int] | None) -> Report:
    """All batches on one engine; with graphs, its checks too. sizes: of the batches, the captured ones if None."""
    import torch

    driver = Driver(args, graphs)
    report = Report()
    config = driver.engine.vllm_config
    report.sizes = sizes or sorted(config.compilation_config.cudagraph_capture_sizes or [])
    report.vocabulary = config.model_config.get_vocab_size()
    report.layers = our_layers()
    if not report.layers and not args.any_method:
        report.problems.append(f"no MoE layer runs through {OURS}")
    if graphs:
        report.captured = captured_sizes()
        report.problems += missing_sizes(report.captured, report.sizes)
    prompts = prompts_of(args, driver.llm.get_tokenizer())
    for size in report.sizes:
        many = [prompts[index % len(prompts)] for index in range(size)]
        whole, profile = driver.batch([cut(prompts, size)], 1, profiled=int(graphs))
        report.batches[f"prompt of {size}"] = whole
        profiles = [(f"prompt of {size}", profile, 1)]
        report.batches[f"{size} decoding"], profile = driver.batch(many, DECODED, PROFILED if graphs else 0)
        profiles.append((f"{size} decoding", profile, PROFILED))
        for name, profile, steps in profiles:
            # Other methods' kernels have other names: nothing to look for.
            wrong = judge_profile(events_of(profile), report.layers, steps) if profile and report.layers else None
            if wrong:
                report.problems.append(f"{name}: {wrong}")
    # Waves of questions: the first brings every buffer to its size, another may still fill a gap of the allocator's.
    # What leaks grows in each. What is compiled or captured may not grow at all after the first.
    bursts(driver, prompts, args.questions, seed=0)
    answers, first = [], state(torch)
    report.reserved = [first["reserved"]]
    for wave in range(1, WAVES + 1):
        answers += bursts(driver, prompts, args.questions, seed=wave)
        last = state(torch)
        report.reserved.append(last["reserved"])
        if report.reserved[-1] <= report.reserved[-2]:
            break
    else:
        report.problems.append(f"reserved memory grew in each of {WAVES} waves: {report.reserved}")
    for name in first:
        if name != "reserved" and last[name] > first[name]:
            report.problems.append(f"{name} grew from {first[name]} to {last[name]} while serving")
    everything = [*answers, *(answer for batch in report.batches.values() for answer in batch)]
    invalid = sum(answer.invalid(report.vocabulary) for answer in everything)
    if invalid:
        report.problems.append(f"{invalid} of {len(everything)} outputs are invalid")
    return report


def state(torch: Any) -> dict[str, int]:
    """What may not grow while serving: compilations, captures, reserved device memory."""
    from vllm.compilation.counter import compilation_counter

    names = ("num_graphs_seen", "num_backend_compilations", "num_inductor_compiles", "num_cudagraph_captured")
    found = {name: int(getattr(compilation_counter, name, 0)) for name in names}
    found["unique_graphs"] = int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    found["reserved"] = torch.cuda.memory_reserved() if torch.cuda.is_available() else 0
    return found


def bursts(driver: Driver, prompts: list[list[int]], questions: int, seed: int) -> list[Answer]:
    """Questions that arrive in bursts of random size, so that prompts and decoding mix at every concurrency."""
    choose = random.Random(seed)
    answers: dict[str, Answer] = {}
    left = questions
    while left:
        for _ in range(min(left, choose.choice((1, 2, 5, 11, 32)))):
            driver.add(choose.choice(prompts), choose.randint(1, BURST_TOKENS), ignore_eos=False)
            left -= 1
        for _ in range(choose.randint(1, 12)):
            if driver.engine.has_unfinished_requests():
                driver.step(answers)
    driver.finish(answers)
    if len(answers) != questions:
        raise AssertionError(f"{len(answers)} of {questions} questions were answered")
    return list(answers.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m evals.capture_smoke", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="directory or name of the checkpoint")
    parser.add_argument("--arguments", default="--quantization humming", help="of vllm serve (default: %(default)s)")
    parser.add_argument("--max-size", type=int, default=512, help="largest graph (default: %(default)s)")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--data", type=Path, help="questions, .jsonl or text (default: tinymath's)")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="at most, of a question (default: %(default)s)")
    parser.add_argument("--questions", type=int, default=128, help="that arrive in bursts (default: %(default)s)")
    parser.add_argument("--tie", type=float, default=0.26, help="nats between tokens that count as equally good")
    parser.add_argument("--any-method", action="store_true", help="do not ask for this package's layers")
    parser.add_argument("--no-graphs", action="store_true", help="a platform without CUDA graphs: check the rest")
    parser.add_argument("--sizes", type=lambda text: [int(size) for size in text.split(",")], help="with --no-graphs")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    if not args.no_graphs:
        import torch

        if not torch.cuda.is_available():
            print("capture smoke: no CUDA graphs on this machine; --no-graphs checks the rest")
            raise SystemExit(3)
    sizes = (args.sizes or [1, 2, 4, 8]) if args.no_graphs else args.sizes
    graph = apart(run, args, not args.no_graphs, sizes)
    eager = apart(run, args, False, graph.sizes)
    equal, total, differences = compare(graph, eager, args.tie)
    problems = graph.problems + [f"eager: {problem}" for problem in eager.problems] + differences
    for problem in problems[:40]:
        print(f"[smoke] {problem}", flush=True)
    if args.out:
        record = surroundings() | {
            "model": args.model,
            "sizes": graph.sizes,
            "captured": graph.captured,
            "layers": graph.layers,
            "equal": equal,
            "answers": total,
            "reserved_bytes": graph.reserved,
            "problems": problems,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    counts = ", ".join(f"{len(found)} {mode}" for mode, found in graph.captured.items()) or "no graphs"
    print(
        f"capture smoke: {'FAILED, ' + str(len(problems)) + ' problems' if problems else 'passed'}: {len(graph.sizes)} "
        f"sizes up to {max(graph.sizes)} ({counts}), {graph.layers} layers of {OURS}, {equal} of {total} outputs equal "
        f"to eager, {len(differences)} beyond a tie, {args.questions} questions in bursts"
    )
    raise SystemExit(1 if problems else 0)


if __name__ == "__main__":
    main()
