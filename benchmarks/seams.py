# SPDX-License-Identifier: Apache-2.0
"""Looks for batch sizes at which a layer's time jumps beyond the added work; needs torch and the kernels, not vLLM.

usage: PYTHONPATH=. python3 benchmarks/seams.py [--shapes ...] [--fmt mxfp4|nvfp4|mxfp4_fp8] [--dtype bf16|fp16]
           [--routing uniform|balanced|zipf|one-hot] [--every] [--most M] [--limit PERCENT] [--deadline SECONDS]
           [--label TEXT] [--out FILE]
Prints a table of neighbours, 8 tokens apart, and their jumps; with --out, appends one JSON line a pair of neighbours.
Unless --every is given, only the neighbours between which the choice of tiles changes or the largest jumps are
expected. benchmarks/README.md states the protocol.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from layer import Layer, beyond_work, measure
from protocol import ALL_SHAPES, SHAPES, Deadline, require_gpu
from routing import ROUTINGS
from torch import Tensor

from vllm_humming import ops
from vllm_humming.moe import schedule, seams
from vllm_humming.moe.weight_formats import WEIGHT_FORMATS
from vllm_humming.moe.weight_formats import Path as ActivationPath

STEP = 8
MOST_EXPECTED = 16  # neighbours with the largest expected jumps
AGAIN = 2  # more measurements of both where a jump was seen

Pair = tuple[int, int]
Record = dict[str, Any]


class NestedLayer(Layer):
    """A layer whose batches are the first tokens of one largest batch: neighbours differ by the added tokens alone."""

    def __init__(self, name: str, dtype: torch.dtype, fmt: str, most: int) -> None:
        super().__init__(name, dtype, fmt)
        self.most = most
        self._drawn: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

    def batch(self, tokens: int, routing: str) -> tuple[Tensor, Tensor, Tensor]:
        if routing not in self._drawn:
            self._drawn[routing] = super().batch(self.most, routing)
        x, weights, ids = self._drawn[routing]
        return x[:tokens], weights[:tokens], ids[:tokens]


def expected_pairs(sizes: tuple[int, int, int, int], path: ActivationPath, most: int) -> list[seams.Seam]:
    """What is expected between all neighbours up to `most` tokens. sizes: top-k, experts, hidden, padded
    intermediate."""
    return seams.find(range(STEP, most + 1, STEP), *sizes, path=path, limit=-math.inf)


def focused(expected: list[seams.Seam]) -> list[Pair]:
    """Neighbours worth measuring, the most suspicious first: the largest expected jumps, then changes of tiles."""
    by_jump = sorted(expected, key=lambda seam: -seam.jump)
    changes = [seam for seam in by_jump[MOST_EXPECTED:] if seam.tiles[0] != seam.tiles[1]]
    return [(seam.before, seam.tokens) for seam in (*by_jump[:MOST_EXPECTED], *changes)]


def measure_pairs(
    pairs: list[Pair], measure_at: Callable[[int], Record], deadline: Deadline, limit: float
) -> tuple[list[Record], list[Pair]]:
    """(a record for the larger of each pair, by tokens, and the pairs that the deadline left out).

    A record is what measure_at has for that many tokens, with `before`, `us_before`, `jump` and `measured`, how many
    times both were. Where the first times jump by more than `limit`, both are measured again in turns, and the shorter
    times count: what disturbs a measurement adds to it.
    """
    points: dict[int, Record] = {}
    found, left = [], []
    for before, tokens in pairs:
        if deadline.passed:
            left.append((before, tokens))
            continue
        for m in (before, tokens):
            if m not in points:
                points[m] = measure_at(m)
        measured = 1
        while measured <= AGAIN and beyond_work(points[tokens], points[before]) - 1 > limit:
            for m in (before, tokens):
                points[m] = min(points[m], measure_at(m), key=lambda record: record["us"])
            measured += 1
        found.append((before, tokens, measured))
    records = [
        points[tokens]
        | {
            "before": before,
            "us_before": points[before]["us"],
            "tiles_before": points[before]["tiles"],
            "jump": round(beyond_work(points[tokens], points[before]) - 1, 4),
            "work": round(points[tokens]["work_us"] / points[before]["work_us"], 4),
            "measured": measured,
        }
        for before, tokens, measured in sorted(found)
    ]
    return records, left


def print_pair(record: Record, expected: seams.Seam, limit: float) -> None:
    tiles, before = " ".join(record["tiles"]), " ".join(record["tiles_before"])
    names = tiles if tiles == before else f"{before} -> {tiles}"
    reason = f"  expected: {expected.reason}" if expected.reason else ""
    mark = f"  SEAM{reason}" if record["jump"] > limit else ""
    note = "" if record["finite"] else "  NOT FINITE"
    times = f"{record['us_before']:>9.1f} {record['us']:>9.1f} {record['work']:>7.3f}"
    jumps = f"{100 * record['jump']:>+7.1f} {100 * expected.jump:>+9.1f}"
    print(f"{record['before']:>6} {record['m']:>6} {times} {jumps}  {names}{mark}{note}", flush=True)


def print_summary(name: str, records: list[Record], left: list[Pair], limit: float) -> None:
    over = [record for record in records if record["jump"] > limit]
    if records:
        worst = max(records, key=lambda record: record["jump"])
        print(
            f"{name}: {len(over)} of {len(records)} neighbours jump by more than {100 * limit:.0f} % beyond the added "
            f"work; the largest is {100 * worst['jump']:+.1f} % from {worst['before']} to {worst['m']} tokens"
        )
    if left:
        print(
            f"{name}: the deadline left out {len(left)} pairs, the first of them {left[0][0]} and {left[0][1]} tokens"
        )


def token_count(text: str) -> int:
    value = int(text)
    if value < 2 * STEP or value % STEP:
        raise argparse.ArgumentTypeError(f"must be a multiple of {STEP} from {2 * STEP} on, found {value}")
    return value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(ALL_SHAPES), default=list(SHAPES))
    parser.add_argument("--routing", choices=ROUTINGS, default="uniform")
    parser.add_argument("--dtype", choices=["bf16", "fp16"], default="bf16")
    parser.add_argument("--fmt", choices=list(WEIGHT_FORMATS), default="mxfp4")
    parser.add_argument("--every", action="store_true", help=f"all neighbours: {STEP}, {2 * STEP}, .. tokens")
    parser.add_argument("--most", type=token_count, default=2048, metavar="M", help="most tokens (2048)")
    parser.add_argument("--limit", type=float, default=100 * seams.LIMIT, metavar="PERCENT", help="jumps to mark (5)")
    parser.add_argument(
        "--deadline", type=float, default=50.0, metavar="SECONDS", help="for measuring one shape (50); 0: no limit"
    )
    parser.add_argument("--label", default="vllm-humming")
    parser.add_argument("--out", type=Path, help="append one JSON line a pair")
    args = parser.parse_args()
    require_gpu()
    ops.load_kernels()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[args.dtype]
    limit = args.limit / 100
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.fmt.upper()} x {args.dtype}, {args.routing}"
    )
    finite = True
    for name in args.shapes:
        layer = NestedLayer(name, dtype, args.fmt, args.most)
        expected = expected_pairs(layer.sizes(0)[1:], layer.path, args.most)
        pairs = [(seam.before, seam.tokens) for seam in expected] if args.every else focused(expected)

        def measure_at(tokens: int, layer: NestedLayer = layer) -> Record:
            return measure(layer, tokens, args.routing, schedule.select(*layer.sizes(tokens), path=layer.path))

        records, left = measure_pairs(pairs, measure_at, Deadline(args.deadline or None), limit)
        print(f"\n{name}\n{'from':>6} {'to':>6} {'us':>9} {'us':>9} {'work x':>7} {'jump %':>7} {'expected':>9}  tiles")
        by_tokens = {seam.tokens: seam for seam in expected}
        for record in records:
            print_pair(record, by_tokens[record["m"]], limit)
        print_summary(name, records, left, limit)
        finite = finite and all(record["finite"] for record in records)
        if args.out:
            with args.out.open("a") as file:
                file.writelines(
                    json.dumps(
                        {"label": args.label} | record | {"expected_jump": round(by_tokens[record["m"]].jump, 4)}
                    )
                    + "\n"
                    for record in records
                )
        del layer, measure_at
        torch.cuda.empty_cache()
    return 0 if finite else 1


if __name__ == "__main__":
    sys.exit(main())
