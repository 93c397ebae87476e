# SPDX-License-Identifier: Apache-2.0
"""The lm-eval tasks: GSM8K from local files or the hub, tinymath's held-out problems, perplexity of local text.

The yaml files beside this one call `tinymath` and `text` here, so `lm_eval --include_path evals` finds both tasks too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # lm-eval loads this file by its path

from evals.tinymath.data import evaluation  # noqa: E402

NAMES = ("gsm8k", "tinymath", "perplexity")


def rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def documents(path: Path) -> list[str]:
    """The texts of a file: question and answer (or text) of each JSON line, or a text file's paragraphs joined to
    pieces of at most 4,000 characters."""
    if path.suffix == ".jsonl":
        return [row["text"] if "text" in row else f"{row['question']}\n{row['answer']}" for row in rows(path)]
    pieces: list[str] = []
    for paragraph in path.read_text().split("\n\n"):
        if pieces and len(pieces[-1]) + len(paragraph) < 4000:
            pieces[-1] += "\n\n" + paragraph
        elif paragraph.strip():
            pieces.append(paragraph)
    return pieces


def dataset(splits: dict[str, list[dict[str, Any]]]) -> Any:
    import datasets

    return datasets.DatasetDict({name: datasets.Dataset.from_list(part) for name, part in splits.items()})


def tinymath(**_: Any) -> Any:
    """custom_dataset of tinymath.yaml."""
    problems = {split: evaluation(split) for split in ("validation", "test")}
    return dataset(
        {
            split: [{"question": problem.question, "answer": problem.answer} for problem in part]
            for split, part in problems.items()
        }
    )


def text(data: str | None = None, **_: Any) -> Any:
    """custom_dataset of perplexity.yaml. data: the path of a .jsonl or text file (tinymath's test problems if none)."""
    if data is None:
        texts = [f"Question: {problem.question}\nAnswer: {problem.answer}" for problem in evaluation("test")]
    else:
        texts = documents(Path(data))
    return dataset({"test": [{"text": piece} for piece in texts]})


def gsm8k(test: Path | None, train: Path | None) -> dict[str, Any]:
    """lm-eval's own gsm8k task, with its data from local files where they are given.

    train: problems for the few-shot prompts; without it the first problems of the test file are shown (and lm-eval
    leaves a problem out of its own prompt).
    """
    import lm_eval
    import yaml

    path = Path(lm_eval.__file__).parent / "tasks" / "gsm8k" / "gsm8k.yaml"
    config: dict[str, Any] = yaml.safe_load(path.read_text())
    if test is not None:
        splits = {"test": rows(test)} | ({"train": rows(train)} if train else {})
        config["custom_dataset"] = lambda **_: dataset(splits)
        config.pop("dataset_name")
        config["training_split"] = "train" if train else None
        # The first examples, not random ones: every run and every engine sees the same prompts.
        config["fewshot_split"] = "train" if train else "test"
        config["fewshot_config"] = {"sampler": "first_n"}
    return config


def manager(data: Path | None = None) -> Any:
    """lm-eval's task manager with the tasks of this folder. data: see `text`."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=HERE, include_defaults=False, metadata={"data": str(data)} if data else None)
