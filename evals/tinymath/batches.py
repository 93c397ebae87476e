# SPDX-License-Identifier: Apache-2.0
"""Endless training batches of packed problems, made by worker processes in an order that the seed fixes."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Generator, Iterator
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from evals.tinymath.data import Problem, prompt, training
from evals.tinymath.tokenizer import END, build_tokenizer

BATCHES_A_TASK = 4
JOINED = 0.1  # share of documents that hold several problems, as few-shot prompts do
OPEN_ROWS = 16


class Batch(NamedTuple):
    """int16 [rows, length] each. parts: 0 padding, 1 a question's token, 2 an answer's token (END included)."""

    tokens: np.ndarray
    documents: np.ndarray
    positions: np.ndarray
    parts: np.ndarray


@lru_cache(maxsize=1)
def _tokenizer() -> Any:
    return build_tokenizer()


def documents(seed: int, length: int) -> Iterator[tuple[list[int], list[int]]]:
    """Tokens and parts of documents of at most `length` tokens."""
    tokenizer, problems = _tokenizer(), training(seed)
    choose = np.random.default_rng(seed)
    end, gap = tokenizer.token_to_id(END), tokenizer.encode("\n\n").ids

    def encoded(group: list[Problem]) -> list[tuple[list[int], list[int]]]:
        questions = tokenizer.encode_batch([prompt(problem.question) for problem in group])
        answers = tokenizer.encode_batch([" " + problem.answer for problem in group])
        return [(question.ids, answer.ids) for question, answer in zip(questions, answers, strict=True)]

    while True:
        waiting = deque(encoded([next(problems) for _ in range(256)]))
        while waiting:
            tokens: list[int] = []
            parts: list[int] = []
            for index in range(1 if choose.random() > JOINED else 4):
                if not waiting or (tokens and len(tokens) + sum(map(len, waiting[0])) + 2 > length):
                    break
                question, answer = waiting.popleft()
                if index:
                    tokens += gap
                    parts += [2] * len(gap)
                tokens += question + answer
                parts += [1] * len(question) + [2] * len(answer)
            yield [*tokens, end], [*parts, 2]


def make_batches(seed: int, rows: int, length: int) -> list[Batch]:
    """The batches of one task."""
    source = documents(seed, length)
    batches = []
    for _ in range(BATCHES_A_TASK):
        batch = Batch(*(np.zeros((rows, length), np.int16) for _ in Batch._fields))
        used = [0] * rows
        row, next_row = list(range(min(OPEN_ROWS, rows))), min(OPEN_ROWS, rows)
        for number in count(1):
            tokens, parts = next(source)
            while row and all(used[index] + len(tokens) > length for index in row):
                row.remove(max(row, key=used.__getitem__))  # the fullest one is closed
                if next_row < rows:
                    row.append(next_row)
                    next_row += 1
            if not row:
                break
            index = next(index for index in row if used[index] + len(tokens) <= length)
            span = slice(used[index], used[index] + len(tokens))
            batch.tokens[index, span] = tokens
            batch.documents[index, span] = number % 32000
            batch.positions[index, span] = range(len(tokens))
            batch.parts[index, span] = parts
            used[index] += len(tokens)
        batches.append(batch)
    return batches


def stream(seed: int, rows: int, length: int, workers: int) -> Generator[Batch, None, None]:
    """Endless batches; closing the iterator ends the workers. Start it before CUDA is used: the workers are forks."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        tasks = (pool.apply_async(make_batches, (task, rows, length)) for task in count(seed << 32))
        pending = deque(next(tasks) for _ in range(2 * workers))
        while True:
            yield from pending.popleft().get()
            pending.append(next(tasks))
