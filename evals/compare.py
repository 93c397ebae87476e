# SPDX-License-Identifier: Apache-2.0
"""Statistics of one run and of two runs over the same problems."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Paired:
    """Two runs over the same problems: ours minus the baseline.

    only_ours, only_baseline: problems that one of them alone answered right. p: McNemar's test, exact and two-sided:
    how likely at least so uneven a split of those problems is if both engines are equally good.
    """

    problems: int
    only_ours: int
    only_baseline: int
    difference: float
    standard_error: float
    p: float
    same_outputs: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"difference {100 * self.difference:+.2f} ± {100 * self.standard_error:.2f} points "
            f"({self.only_ours} right only here, {self.only_baseline} only in the baseline, p = {self.p:.2f}); "
            f"{self.same_outputs} of {self.problems} outputs equal"
        )


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error."""
    count = len(values)
    mean = sum(values) / count
    if count < 2:
        return mean, math.nan
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1) / count)


def mcnemar(only_first: int, only_second: int) -> float:
    """The exact two-sided p of McNemar's test: a binomial test with p = 1/2 of the discordant pairs."""
    count, least = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(count, k) for k in range(least + 1))
    return min(1.0, 2 * tail / 2**count)


def paired(
    ours: Sequence[bool], baseline: Sequence[bool], our_outputs: Sequence[str], baseline_outputs: Sequence[str]
) -> Paired:
    """Compares the right and wrong answers of two runs, problem by problem."""
    if not len(ours) == len(baseline) == len(our_outputs) == len(baseline_outputs):
        raise ValueError("the two runs hold different problems")
    only_ours = sum(a and not b for a, b in zip(ours, baseline, strict=True))
    only_baseline = sum(b and not a for a, b in zip(ours, baseline, strict=True))
    difference, error = mean_and_error([int(a) - int(b) for a, b in zip(ours, baseline, strict=True)])
    return Paired(
        len(ours),
        only_ours,
        only_baseline,
        difference,
        error,
        mcnemar(only_ours, only_baseline),
        sum(a == b for a, b in zip(our_outputs, baseline_outputs, strict=True)),
    )


@dataclass(frozen=True)
class Likelihoods:
    """Two runs over the same texts: the perplexity's distance from the baseline's, as a fraction.

    standard_error: of that distance, from the texts' own differences, which need not be alike.
    """

    relative: float
    standard_error: float

    def as_dict(self) -> dict[str, float]:
        return {"relative_perplexity": self.relative, "standard_error": self.standard_error}

    def __str__(self) -> str:
        return f"perplexity {100 * self.relative:+.4f} ± {100 * self.standard_error:.4f} %"


def paired_perplexity(ours: Sequence[float], baseline: Sequence[float], tokens: int) -> Likelihoods:
    """Compares the log likelihoods of the same texts, which hold so many tokens together."""
    if len(ours) != len(baseline):
        raise ValueError("the two runs hold different texts")
    mean, error = mean_and_error([b - a for a, b in zip(ours, baseline, strict=True)])
    ratio = math.exp(mean * len(ours) / tokens)
    return Likelihoods(ratio - 1, ratio * error * len(ours) / tokens)
