# SPDX-License-Identifier: Apache-2.0
"""Where the expected time of a layer jumps from one batch size to the next by more than the added work explains."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from vllm_humming.moe import schedule
from vllm_humming.moe.schedule import TILES, Choice, uniform_load
from vllm_humming.moe.weight_formats import Path

LIMIT = 0.05  # a jump beyond the added work that is worth a line
# What a layer's floor is made of, as in benchmarks/protocol.py.
WEIGHT_BYTES = 17 / 32
MEMORY_RATE = 4.3e12
TENSOR_RATE = {"a16": 690e12, "w4a8": 1380e12}


@dataclass(frozen=True)
class Seam:
    """From `before` to `tokens` tokens the expected time grows from us[0] to us[1] and by `jump` (0.07: 7 %) beyond
    the added work. tiles: names of the (up, down) tiles of both. reason: "record", of measured.py: without them there
    is no such jump; "rounds": there is none if the CTAs shared the last tiles evenly; else "widths": no compiled tile
    takes that many rows for less. A jump up to LIMIT has none, ""."""

    before: int
    tokens: int
    us: tuple[float, float]
    jump: float
    tiles: tuple[tuple[str, str], tuple[str, str]]
    reason: str

    def __str__(self) -> str:
        old, new = (" ".join(pair) for pair in self.tiles)
        tiles = old if old == new else f"{old} -> {new}"
        times = f"{self.us[0]:.1f} -> {self.us[1]:.1f} us"
        return f"{self.before} -> {self.tokens} tokens: {times}, {100 * self.jump:+.1f} %, {self.reason} ({tiles})"


def beyond_work(us: tuple[float, float], work: tuple[float, float]) -> float:
    """By how much (0.07: 7 %) a time grew beyond the work; less work explains nothing."""
    return us[1] / us[0] / max(1.0, work[1] / work[0]) - 1


def work_us(tokens: int, top_k: int, experts: int, hidden: int, intermediate: int, path: Path) -> float:
    """The floor of uniform routing in microseconds, with the rows of each expert in eights: the active experts' weights
    at the memory's rate, or the products at the tensor cores'."""
    load = uniform_load(float(tokens * top_k), experts)
    expert = 3 * hidden * intermediate
    rows = sum(rows * number for rows, number in load.experts.items())
    return max(load.active * expert * WEIGHT_BYTES / MEMORY_RATE, 2 * rows * expert / TENSOR_RATE[path]) * 1e6


@dataclass(frozen=True)
class _Point:
    tokens: int
    work: float
    choice: Choice
    cheapest: float  # us of the tiles that would be chosen if there were no records


def _point(tokens: int, top_k: int, experts: int, hidden: int, intermediate: int, path: Path) -> _Point:
    sizes = (top_k, experts, hidden, intermediate)
    layer = schedule.Layer(tokens, *sizes, path=path)
    cheapest = schedule.choose(layer, records=False).us
    return _Point(tokens, work_us(tokens, *sizes, path), schedule.choose(layer), cheapest)


def find(
    tokens: Iterable[int],
    top_k: int,
    experts: int,
    hidden: int,
    intermediate: int,
    *,
    path: Path = "a16",
    limit: float = LIMIT,
) -> list[Seam]:
    """The jumps of more than `limit` between neighbours of `tokens` (ascending), for uniform routing, gated layers."""
    points = [_point(m, top_k, experts, hidden, intermediate, path) for m in tokens]
    found = []
    for old, new in pairwise(points):
        work = old.work, new.work
        us = old.choice.us, new.choice.us
        jump = beyond_work(us, work)
        if jump <= limit:
            continue
        if jump <= LIMIT:
            reason = ""
        elif beyond_work((old.cheapest, new.cheapest), work) <= LIMIT:
            reason = "record"
        elif beyond_work((old.choice.even_us, new.choice.even_us), work) <= LIMIT:
            reason = "rounds"
        else:
            reason = "widths"
        (old_up, old_down), (up, down) = ((TILES[i].name for i in point.choice.tiles) for point in (old, new))
        tiles = (old_up, old_down), (up, down)
        found.append(Seam(old.tokens, new.tokens, us, jump, tiles, reason))
    return found
