# SPDX-License-Identifier: Apache-2.0
"""Grade-school arithmetic word problems with worked steps, written as GSM8K writes them.

    python -m evals.tinymath.data test.jsonl [--split test|validation|train] [--count 1000]

A problem is a template, the numbers put into it, and names and things that change nothing. Its key is (template,
numbers): the validation and test splits hold distinct keys, and training never draws one of them.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType
from typing import Any

Key = tuple[str, tuple[int, ...]]

EVAL_SIZES = {"test": 1000, "validation": 500}
EVAL_SEEDS = {"test": 20_261_130, "validation": 20_261_131}


def _words(text: str) -> list[str]:
    return text.split()


NAMES = _words(
    "Ada Ben Cara Dan Ella Finn Grace Hugo Iris Jack Kate Leo Mia Noah Olga Paul Rosa Sam Tina Uma Vera Will Yara Zoe "
    "Amir Bella Carlos Dina Emil Fatima George Hana Ivan Julia Ken Lena Maria Nina Omar Petra"
)
ITEMS = _words(
    "apples books marbles stickers pencils cards shells stamps coins toys buttons balls beads cookies oranges flowers "
    "photos puzzles ribbons stones"
)
BOXES = _words("boxes bags baskets jars trays crates")
GOODS = _words("shirts hats lamps mugs scarves plants candles bowls belts clocks")
ANIMALS = _words("cows sheep goats horses dogs pigs")
BIRDS = _words("hens ducks geese parrots")
SHOPS = _words("shop market store bakery farm library school museum")
WORDS = {
    "n": NAMES,
    "m": NAMES,
    "items": ITEMS,
    "boxes": BOXES,
    "goods": GOODS,
    "animals": ANIMALS,
    "birds": BIRDS,
    "shop": SHOPS,
}


@dataclass(frozen=True)
class Template:
    """numbers: name -> inclusive range (or a tuple of choices). given: numbers that follow from the drawn ones.

    questions: wordings, one is drawn. steps: (result's name, `left op right`, sentence with {} for the equation).
    where: condition on the drawn and given numbers. drill: bare arithmetic, in training only.
    """

    name: str
    numbers: dict[str, tuple[int, ...]]
    questions: tuple[str, ...]
    steps: tuple[tuple[str, str, str], ...]
    given: tuple[tuple[str, str], ...] = ()
    where: str = "True"
    drill: bool = False


@dataclass(frozen=True)
class Problem:
    question: str
    answer: str
    key: Key

    @property
    def result(self) -> str:
        return self.answer.rsplit("#### ", 1)[1]


def prompt(question: str) -> str:
    """What the model is asked: lm-eval's GSM8K prompt."""
    return f"Question: {question}\nAnswer:"


def _t(name: str, numbers: dict[str, Any], questions: list[str], *steps: tuple[str, str, str], **more: Any) -> Template:
    return Template(name, numbers, tuple(questions), steps, **more)


TEMPLATES = (
    # One step: totals and differences
    _t(
        "total",
        {"a": (11, 499), "b": (11, 499)},
        [
            "{n} has {a} {items}. {m} has {b} {items}. How many {items} do they have together?",
            "There are {a} {items} in one room and {b} {items} in another room. How many {items} are there in total?",
            "{n} found {a} {items} on Monday and {b} {items} on Tuesday. How many {items} did {n} find altogether?",
        ],
        ("r", "a + b", "Together that makes {} {items}."),
    ),
    _t(
        "more_came",
        {"a": (20, 600), "b": (11, 300)},
        [
            "{n} had {a} {items}. Then {m} gave {n} {b} more {items}. How many {items} does {n} have now?",
            "A {shop} had {a} {items} and bought {b} more. How many {items} does the {shop} have now?",
        ],
        ("r", "a + b", "Now there are {} {items}."),
    ),
    _t(
        "left",
        {"a": (30, 900), "b": (11, 800)},
        [
            "{n} had {a} {items} and gave {b} of them to {m}. How many {items} does {n} have left?",
            "A {shop} had {a} {items}. It sold {b} of them. How many {items} are left?",
            "There were {a} {items} on a table. {n} took {b} of them away. How many {items} remained on the table?",
        ],
        ("r", "a - b", "There are {} {items} left."),
        where="a > b + 2",
    ),
    _t(
        "how_many_more",
        {"a": (30, 900), "b": (11, 800)},
        [
            "{n} has {a} {items} and {m} has {b} {items}. How many more {items} does {n} have than {m}?",
            "A {shop} sold {a} {items} in May and {b} {items} in June. How many more {items} did it sell in May?",
        ],
        ("r", "a - b", "The difference is {} {items}."),
        where="a > b + 2",
    ),
    _t(
        "needs",
        {"a": (30, 600), "b": (11, 500)},
        [
            "{n} wants to collect {a} {items} and has {b} so far. How many more {items} does {n} need?",
            "{n} needs ${a} for a bike and has saved ${b}. How many more dollars does {n} need?",
        ],
        ("r", "a - b", "So {} more are needed."),
        where="a > b + 2",
    ),
    _t(
        "age_later",
        {"a": (4, 60), "b": (3, 35)},
        ["{n} is {a} years old. How old will {n} be in {b} years?"],
        ("r", "a + b", "In {b} years {n} will be {} years old."),
    ),
    _t(
        "age_gap",
        {"a": (12, 90), "b": (3, 60)},
        ["{n} is {a} years old and {m} is {b} years younger. How old is {m}?"],
        ("r", "a - b", "{m} is {} years old."),
        where="a > b + 2",
    ),
    # One step: multiplication and division
    _t(
        "groups",
        {"a": (3, 12), "b": (3, 60)},
        [
            "{n} has {a} {boxes} with {b} {items} each. How many {items} does {n} have?",
            "There are {a} {boxes} in a {shop}. Each of them holds {b} {items}. How many {items} are there?",
        ],
        ("r", "a * b", "There are {} {items}."),
    ),
    _t(
        "price",
        {"a": (3, 12), "b": (3, 60)},
        [
            "{n} buys {a} {goods} that cost ${b} each. How much does {n} pay?",
            "One of the {goods} in a {shop} costs ${b}. How many dollars do {a} {goods} cost?",
        ],
        ("r", "a * b", "The price is ${}."),
    ),
    _t(
        "rate_pages",
        {"a": (5, 60), "b": (3, 12)},
        ["{n} reads {a} pages a day. How many pages does {n} read in {b} days?"],
        ("r", "a * b", "{n} reads {} pages."),
    ),
    _t(
        "speed",
        {"a": (12, 95), "b": (2, 9)},
        ["A train goes {a} miles an hour. How many miles does it go in {b} hours?"],
        ("r", "a * b", "The train goes {} miles."),
    ),
    _t(
        "share",
        {"b": (2, 12), "r": (3, 60)},
        [
            "{n} shares {a} {items} equally among {b} friends. How many {items} does each friend get?",
            "{n} puts {a} {items} into {b} {boxes}, the same number in each. How many {items} are in each?",
        ],
        ("r", "a / b", "Each gets {} {items}."),
        given=(("a", "b * r"),),
    ),
    _t(
        "how_many_boxes",
        {"b": (3, 12), "r": (3, 60)},
        [
            "{n} has {a} {items}. {b} of them fit into each of the {boxes}. How many {boxes} does {n} fill?",
        ],
        ("r", "a / b", "{n} fills {} {boxes}."),
        given=(("a", "b * r"),),
    ),
    _t(
        "unit_price",
        {"b": (2, 12), "r": (3, 60)},
        ["{n} paid ${a} for {b} {goods} of the same price. How many dollars did each cost?"],
        ("r", "a / b", "Each cost ${}."),
        given=(("a", "b * r"),),
    ),
    _t(
        "travel_time",
        {"b": (11, 80), "r": (2, 9)},
        ["{n} drives {a} miles at {b} miles an hour. How many hours does the drive take?"],
        ("r", "a / b", "The drive takes {} hours."),
        given=(("a", "b * r"),),
    ),
    _t(
        "days_to_finish",
        {"b": (4, 40), "r": (3, 12)},
        ["A book has {a} pages. {n} reads {b} pages a day. How many days does {n} need for the book?"],
        ("r", "a / b", "{n} needs {} days."),
        given=(("a", "b * r"),),
    ),
    # Two steps
    _t(
        "total_three",
        {"a": (11, 300), "b": (11, 300), "c": (11, 300)},
        [
            "{n} picked {a} {items} on Monday, {b} on Tuesday and {c} on Friday. How many {items} did {n} pick in all?",
            "A {shop} sold {a} {items} in May, {b} in June and {c} in July. How many {items} did it sell altogether?",
        ],
        ("s", "a + b", "The first two make {} {items}."),
        ("r", "s + c", "With the third that is {} {items}."),
    ),
    _t(
        "lost_and_found",
        {"a": (40, 500), "b": (11, 400), "c": (11, 300)},
        [
            "{n} had {a} {items}, lost {b} of them and then found {c} new ones. How many {items} does {n} have now?",
            "There were {a} people on a train. At a stop {b} got off and {c} got on. How many people are on the train?",
        ],
        ("s", "a - b", "After that {} were left."),
        ("r", "s + c", "In the end there are {}."),
        where="a > b + 2",
    ),
    _t(
        "sold_twice",
        {"a": (100, 900), "b": (11, 300), "c": (11, 300)},
        ["A {shop} had {a} {items}. It sold {b} in the morning and {c} in the afternoon. How many {items} are left?"],
        ("s", "b + c", "The {shop} sold {} {items}."),
        ("r", "a - s", "There are {} {items} left."),
        where="a > b + c + 2",
    ),
    _t(
        "more_than",
        {"a": (11, 400), "b": (5, 200)},
        [
            "{n} has {a} {items}. {m} has {b} more {items} than {n}. How many {items} do they have together?",
            "{n} scored {a} points. {m} scored {b} points more than {n}. How many points did they score together?",
        ],
        ("s", "a + b", "{m} has {}."),
        ("r", "a + s", "Together they have {}."),
    ),
    _t(
        "fewer_than",
        {"a": (30, 400), "b": (5, 300)},
        ["{n} has {a} {items}. {m} has {b} fewer {items} than {n}. How many {items} do they have together?"],
        ("s", "a - b", "{m} has {} {items}."),
        ("r", "a + s", "Together they have {} {items}."),
        where="a > b + 2",
    ),
    _t(
        "times_as_many",
        {"a": (5, 60), "b": (2, 9)},
        ["{n} has {a} {items}. {m} has {b} times as many. How many {items} do they have together?"],
        ("s", "a * b", "{m} has {} {items}."),
        ("r", "a + s", "Together they have {} {items}."),
    ),
    _t(
        "half_as_many",
        {"h": (6, 400)},
        [
            "{n} sold {a} {items} in April and half as many in May. How many {items} did {n} sell altogether?",
            "{n} has {a} {items}. {m} has half as many. How many {items} do they have together?",
        ],
        ("s", "a / 2", "Half as many is {} {items}."),
        ("r", "a + s", "Altogether that is {} {items}."),
        given=(("a", "2 * h"),),
    ),
    _t(
        "groups_and_loose",
        {"a": (3, 9), "b": (4, 50), "c": (3, 99)},
        ["{n} has {a} {boxes} of {b} {items} each and {c} loose {items}. How many {items} does {n} have in all?"],
        ("s", "a * b", "In the {boxes} there are {} {items}."),
        ("r", "s + c", "With the loose ones that is {} {items}."),
    ),
    _t(
        "groups_minus",
        {"a": (3, 9), "b": (4, 50), "c": (5, 300)},
        ["{n} buys {a} {boxes} of {b} {items} each and gives {c} {items} away. How many {items} are left?"],
        ("s", "a * b", "{n} buys {} {items}."),
        ("r", "s - c", "There are {} {items} left."),
        where="a * b > c + 2",
    ),
    _t(
        "change",
        {"a": (2, 9), "b": (3, 40), "c": (20, 50, 100, 200, 400)},
        ["{n} buys {a} {goods} for ${b} each and pays with ${c}. How many dollars of change does {n} get?"],
        ("s", "a * b", "The {goods} cost ${}."),
        ("r", "c - s", "The change is ${}."),
        where="c > a * b",
    ),
    _t(
        "wage_and_tip",
        {"a": (8, 40), "b": (3, 9), "c": (5, 90)},
        ["{n} earns ${a} an hour and works {b} hours. Then {n} gets a tip of ${c}. How many dollars is that in all?"],
        ("s", "a * b", "For the work {n} gets ${}."),
        ("r", "s + c", "With the tip that is ${}."),
    ),
    _t(
        "left_then_share",
        {"b": (5, 200), "c": (2, 9), "r": (3, 50)},
        [
            "{n} has {a} {items}, keeps {b} and shares the rest equally among {c} friends. "
            "How many does each friend get?"
        ],
        ("s", "a - b", "{n} shares {} {items}."),
        ("r", "s / c", "Each friend gets {} {items}."),
        given=(("a", "b + c * r"),),
    ),
    _t(
        "join_then_share",
        {"a": (5, 200), "c": (2, 9), "r": (4, 60)},
        ["{n} has {a} {items} and {m} has {b}. They put them together into {c} equal {boxes}. How many are in each?"],
        ("s", "a + b", "Together they have {} {items}."),
        ("r", "s / c", "Each holds {} {items}."),
        given=(("b", "c * r - a"),),
        where="b > 4",
    ),
    _t(
        "share_then_more",
        {"b": (2, 9), "s": (4, 60), "c": (3, 99)},
        ["{n} and friends share {a} {items} equally among {b} people. Then {n} finds {c} more. How many has {n} now?"],
        ("s", "a / b", "{n} gets {} {items}."),
        ("r", "s + c", "Now {n} has {} {items}."),
        given=(("a", "b * s"),),
    ),
    _t(
        "unit_then_many",
        {"b": (2, 9), "s": (3, 50), "c": (2, 9)},
        ["{b} {goods} cost ${a}. How many dollars do {c} of these {goods} cost?"],
        ("s", "a / b", "One costs ${}."),
        ("r", "s * c", "{c} cost ${}."),
        given=(("a", "b * s"),),
        where="b != c",
    ),
    _t(
        "percent_off",
        {"p": (10, 20, 25, 50), "h": (2, 120)},
        ["A coat costs ${a}. Today it costs {p} percent less. How many dollars does it cost today?"],
        ("s", "a / d", "{p} percent of ${a} is ${}."),
        ("r", "a - s", "Today it costs ${}."),
        given=(("d", "100 // p"), ("a", "d * h")),
    ),
    _t(
        "fraction_left",
        {"d": (2, 3, 4, 5), "h": (4, 120)},
        ["{n} has {a} {items} and gives one out of every {d} of them to {m}. How many {items} does {n} keep?"],
        ("s", "a / d", "{n} gives away {} {items}."),
        ("r", "a - s", "{n} keeps {} {items}."),
        given=(("a", "d * h"),),
    ),
    _t(
        "weeks",
        {"a": (3, 60), "b": (2, 9), "c": (5, 300)},
        ["{n} saves ${a} a week and wants ${c} for a coat. How many dollars are left after {b} weeks and the coat?"],
        ("s", "a * b", "{n} saves ${}."),
        ("r", "s - c", "After the coat ${} are left."),
        where="a * b > c + 2",
    ),
    _t(
        "daily_for_a_week",
        {"a": (3, 60), "b": (5, 99)},
        ["{n} reads {a} pages on each day of a week and {b} pages on the day after it. How many pages is that?"],
        ("s", "a * 7", "In the week {n} reads {} pages."),
        ("r", "s + b", "Altogether that is {} pages."),
    ),
    _t(
        "minutes_left",
        {"a": (2, 9), "b": (5, 110)},
        ["A trip takes {a} hours. {b} minutes of it are over. How many minutes are left?"],
        ("s", "a * 60", "{a} hours are {} minutes."),
        ("r", "s - b", "There are {} minutes left."),
    ),
    _t(
        "minutes_total",
        {"a": (1, 9), "b": (5, 55)},
        ["A film lasts {a} hours and {b} minutes. How many minutes is that?"],
        ("s", "a * 60", "{a} hours are {} minutes."),
        ("r", "s + b", "Altogether that is {} minutes."),
    ),
    _t(
        "rows_empty",
        {"a": (4, 12), "b": (5, 40), "c": (3, 200)},
        ["A hall has {a} rows of {b} seats. {c} seats are taken. How many seats are free?"],
        ("s", "a * b", "The hall has {} seats."),
        ("r", "s - c", "{} seats are free."),
        where="a * b > c + 2",
    ),
    # Three steps
    _t(
        "two_kinds",
        {"a": (2, 9), "b": (3, 40), "c": (2, 9), "d": (3, 40)},
        [
            "{n} buys {a} hats for ${b} each and {c} mugs for ${d} each. How many dollars does {n} spend?",
            "{n} has {a} small {boxes} with {b} {items} each and {c} large ones with {d} {items} each. "
            "How many {items} does {n} have?",
        ],
        ("s", "a * b", "The first kind makes {}."),
        ("t", "c * d", "The second kind makes {}."),
        ("r", "s + t", "In all that is {}."),
    ),
    _t(
        "legs",
        {"a": (3, 99), "b": (3, 99)},
        ["A farm has {a} {animals} and {b} {birds}. How many legs do all of them have?"],
        ("s", "a * 4", "The {animals} have {} legs."),
        ("t", "b * 2", "The {birds} have {} legs."),
        ("r", "s + t", "Together that is {} legs."),
    ),
    _t(
        "two_kinds_change",
        {"b": (3, 90), "c": (2, 9), "d": (3, 40), "e": (200, 300, 400, 500)},
        ["{n} has ${e} and buys a lamp for ${b} and {c} mugs for ${d} each. How many dollars are left?"],
        ("s", "c * d", "The mugs cost ${}."),
        ("t", "s + b", "With the lamp {n} pays ${}."),
        ("r", "e - t", "{n} has ${} left."),
        where="e > b + c * d",
    ),
    _t(
        "profit",
        {"a": (3, 9), "b": (4, 30), "c": (2, 25)},
        ["{n} buys {a} {goods} for ${c} each and sells them for ${b} each. How many dollars does {n} earn?"],
        ("s", "a * b", "{n} sells them for ${}."),
        ("t", "a * c", "{n} paid ${}."),
        ("r", "s - t", "{n} earns ${}."),
        where="b > c",
    ),
    _t(
        "three_friends",
        {"a": (5, 60), "b": (2, 6), "c": (3, 50)},
        [
            "{n} has {a} {items}. {m} has {b} times as many as {n}, and a friend has {c} more than {m}. "
            "How many {items} do the three have together?"
        ],
        ("s", "a * b", "{m} has {} {items}."),
        ("t", "s + c", "The friend has {} {items}."),
        ("u", "a + s", "{n} and {m} have {} {items}."),
        ("r", "u + t", "Together the three have {} {items}."),
    ),
    _t(
        "remaining_share",
        {"a": (2, 9), "c": (5, 60), "d": (2, 6), "r": (3, 30)},
        [
            "{n} bakes {a} trays of {b} cookies, sells {c} cookies and shares the rest equally among {d} friends. "
            "How many cookies does each friend get?"
        ],
        ("s", "a * b", "{n} bakes {} cookies."),
        ("t", "s - c", "After the sale {} cookies are left."),
        ("r", "t / d", "Each friend gets {} cookies."),
        given=(("b", "(c + d * r) // a"),),
        where="(c + d * r) % a == 0 and b > 2",
    ),
    _t(
        "average",
        {"a": (5, 150), "b": (5, 150), "r": (10, 150)},
        ["{n} scored {a}, {b} and {c} points in three games. What is the average of the three games?"],
        ("s", "a + b", "The first two games make {} points."),
        ("t", "s + c", "All three make {} points."),
        ("r", "t / 3", "The average is {} points."),
        given=(("c", "3 * r - a - b"),),
        where="4 < c < 200",
    ),
    _t(
        "weekly_saving",
        {"a": (10, 60), "b": (2, 9), "r": (2, 12)},
        ["{n} gets ${a} a week and spends ${b} of it. How many weeks does {n} need to save ${c}?"],
        ("s", "a - b", "{n} saves ${} a week."),
        ("r", "c / s", "{n} needs {} weeks."),
        given=(("c", "(a - b) * r"),),
    ),
    _t(
        "garden",
        {"a": (3, 60), "b": (3, 60)},
        ["A garden is {a} meters long and {b} meters wide. How many meters of fence go around it?"],
        ("s", "a + b", "One long and one short side make {} meters."),
        ("r", "s * 2", "The fence is {} meters long."),
    ),
    _t(
        "two_speeds",
        {"a": (10, 70), "b": (2, 6), "c": (10, 70), "d": (2, 6)},
        ["{n} drives {b} hours at {a} miles an hour and {d} hours at {c} miles an hour. How many miles is that?"],
        ("s", "a * b", "The first part is {} miles."),
        ("t", "c * d", "The second part is {} miles."),
        ("r", "s + t", "In all that is {} miles."),
    ),
    _t(
        "tank",
        {"a": (5, 60), "b": (2, 30), "c": (2, 9)},
        [
            "A tap fills {a} liters a minute into a tank, and {b} liters a minute leak out. "
            "How many liters are in the tank after {c} minutes?"
        ],
        ("s", "a - b", "Each minute adds {} liters."),
        ("r", "s * c", "After {c} minutes there are {} liters."),
        where="a > b",
    ),
    # Bare arithmetic: a share of the training text, never asked in an evaluation
    _t("add", {"a": (2, 999), "b": (2, 999)}, ["What is {a} + {b}?"], ("r", "a + b", "It is {}."), drill=True),
    _t(
        "subtract",
        {"a": (2, 999), "b": (2, 999)},
        ["What is {a} - {b}?"],
        ("r", "a - b", "It is {}."),
        where="a >= b",
        drill=True,
    ),
    _t("multiply", {"a": (2, 99), "b": (2, 12)}, ["What is {a} * {b}?"], ("r", "a * b", "It is {}."), drill=True),
    _t(
        "divide",
        {"b": (2, 12), "r": (2, 99)},
        ["What is {a} / {b}?"],
        ("r", "a / b", "It is {}."),
        given=(("a", "b * r"),),
        drill=True,
    ),
    _t(
        "divide_by_two_digits",
        {"b": (11, 80), "r": (2, 12)},
        ["What is {a} / {b}?"],
        ("r", "a / b", "It is {}."),
        given=(("a", "b * r"),),
        drill=True,
    ),
)


class Generator:
    """Draws problems from TEMPLATES. The same seed gives the same problems."""

    def __init__(self, seed: int, *, drills: float = 0.0) -> None:
        """drills: the share of bare arithmetic."""
        self.random = random.Random(seed)
        self.drills = drills
        self.plain = [template for template in TEMPLATES if not template.drill]
        self.bare = [template for template in TEMPLATES if template.drill]

    def problem(self) -> Problem:
        templates = self.bare if self.drills and self.random.random() < self.drills else self.plain
        return self.fill(self.random.choice(templates))

    def fill(self, template: Template) -> Problem:
        """One problem of the template."""
        drawn, values = self._numbers(template)
        words: dict[str, Any] = {name: self.random.choice(choices) for name, choices in WORDS.items()}
        while words["m"] == words["n"]:
            words["m"] = self.random.choice(NAMES)
        words |= values
        question = self.random.choice(template.questions).format_map(words)
        lines = []
        for result, expression, sentence in template.steps:
            value = _exact(expression, values)
            values[result] = value
            left, operator, right = expression.split()
            equation = f"{values.get(left, left)} {operator} {values.get(right, right)}"
            dollar = "$" if "${}" in sentence else ""
            step = f"{equation} = {dollar}<<{equation.replace(' ', '')}={value}>>{value}"
            lines.append(sentence.replace("${}", "{}").format(step, **words))
        lines.append(f"#### {values[template.steps[-1][0]]}")
        return Problem(question, "\n".join(lines), (template.name, drawn))

    def _numbers(self, template: Template) -> tuple[tuple[int, ...], dict[str, int]]:
        while True:
            values = {name: self._draw(span) for name, span in template.numbers.items()}
            drawn = tuple(values.values())
            for name, expression in template.given:
                values[name] = _evaluate(expression, values)
            if _evaluate(template.where, values):
                # Results of steps must not be in the text before their step.
                results = {result for result, _, _ in template.steps}
                return drawn, {name: value for name, value in values.items() if name not in results}

    def _draw(self, span: tuple[int, ...]) -> int:
        if len(span) != 2:
            return self.random.choice(span)
        low, high = span
        # Half of the wide ranges' draws are small, so that short numbers are seen often.
        if high > 200 and self.random.random() < 0.5:
            high = 99
        return self.random.randint(min(low, high), high)


_CODE: dict[str, CodeType] = {}


def _evaluate(expression: str, values: dict[str, int]) -> Any:
    """The value of one of this file's expressions."""
    if expression not in _CODE:
        _CODE[expression] = compile(expression, "<template>", "eval")
    return eval(_CODE[expression], {"__builtins__": {}}, values)


def _exact(expression: str, values: dict[str, int]) -> int:
    value = _evaluate(expression, values)
    if value != int(value) or value < 0:
        raise ValueError(f"{expression} with {values} is {value}, not a natural number")
    return int(value)


def evaluation(split: str) -> list[Problem]:
    """The problems of "test" or "validation": distinct keys, and none in common between the two."""
    taken: set[Key] = set()
    if split == "validation":
        taken = {problem.key for problem in evaluation("test")}
    generator = Generator(EVAL_SEEDS[split])
    problems: list[Problem] = []
    while len(problems) < EVAL_SIZES[split]:
        problem = generator.problem()
        if problem.key not in taken:
            taken.add(problem.key)
            problems.append(problem)
    return problems


@lru_cache(maxsize=1)
def held_out() -> frozenset[Key]:
    """The keys that training must not draw."""
    return frozenset(problem.key for split in EVAL_SIZES for problem in evaluation(split))


def training(seed: int, *, drills: float = 0.15) -> Iterator[Problem]:
    """Endless training problems, without the held-out keys."""
    generator = Generator(seed, drills=drills)
    excluded = held_out()
    while True:
        problem = generator.problem()
        if problem.key not in excluded:
            yield problem


def corpus_words() -> list[str]:
    """All words that problems are made of, for the tokenizer."""
    texts = [prompt("")]
    for template in TEMPLATES:
        texts += [*template.questions, *(sentence for _, _, sentence in template.steps)]
    texts += [" ".join(choices) for choices in WORDS.values()]
    return sorted(set(re.findall(r"[A-Za-z]+", re.sub(r"\{\w*\}", " ", " ".join(texts)))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="JSON Lines file to write: question and answer, as GSM8K's files")
    parser.add_argument("--split", choices=["test", "validation", "train"], default="test")
    parser.add_argument("--count", type=int, help="number of problems (default: all; 1000 of train)")
    parser.add_argument("--seed", type=int, default=0, help="of the train split")
    args = parser.parse_args()
    problems = training(args.seed) if args.split == "train" else iter(evaluation(args.split))
    count = args.count or EVAL_SIZES.get(args.split, 1000)
    with args.path.open("w") as stream:
        for _, problem in zip(range(count), problems, strict=False):
            stream.write(json.dumps({"question": problem.question, "answer": problem.answer}) + "\n")


if __name__ == "__main__":
    main()
