# SPDX-License-Identifier: Apache-2.0
"""Expected times have no seams but those that are listed here, each with its reason."""

import heapq
import random
from dataclasses import replace

import pytest

from vllm_humming.moe import measured, schedule, seams

SHAPES = {  # top-k, experts, hidden, padded intermediate
    "E 32": (8, 32, 6144, 2048),
    "E 12": (8, 12, 3584, 3072),
    "E 128": (8, 128, 2048, 768),
    "E 256": (8, 256, 7168, 2048),
    "gpt-oss": (4, 32, 2880, 2944),
}
# Jumps of more than 5 % beyond the added work, from 8 tokens fewer to these. "rounds": one more round of CTAs starts
# for hardly any tiles, and no other tile is cheaper. "widths": with so few experts all of them need the next width at
# about the same batch size, and its chunks take more cycles than the floor has them take. "record": of measured.py.
# A seam that goes, too, must go from here.
KNOWN = {
    ("a16", "E 32"): {40: "widths", 48: "widths", 144: "widths", 224: "record"},
    ("a16", "E 12"): {
        16: "widths",
        80: "record",
        136: "rounds",
        144: "rounds",
        200: "widths",
        248: "widths",
        376: "rounds",
        472: "rounds",
    },
    ("a16", "gpt-oss"): {72: "record"},
    ("w4a8", "E 32"): {40: "rounds", 312: "rounds", 328: "rounds", 392: "rounds"},
    ("w4a8", "E 12"): {32: "rounds", 56: "widths", 72: "widths", 104: "rounds"},
    ("w4a8", "E 128"): {160: "rounds", 176: "record", 1240: "rounds"},
    ("w4a8", "gpt-oss"): {16: "rounds", 88: "rounds"},
}


@pytest.mark.parametrize("path", ["a16", "w4a8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_time_does_not_jump_but_where_it_is_known_to(shape, path):
    found = seams.find(range(8, 2049, 8), *SHAPES[shape], path=path)
    listed = "\n".join(map(str, found))
    assert {seam.tokens: seam.reason for seam in found} == KNOWN.get((path, shape), {}), listed
    assert all(seam.tokens - seam.before == 8 for seam in found)
    # The largest is where the 12 experts' rows leave the tile for few rows, the cheapest by far up to 8.
    assert all(seam.jump < (0.26 if (path, shape, seam.tokens) == ("a16", "E 12", 16) else 0.13) for seam in found), (
        listed
    )


def test_a_jump_of_a_record_is_told_from_others(monkeypatch):
    worse = measured.Record(256, 4096, 7168, (50, 55), "64x16")
    monkeypatch.setattr(measured, "RECORDS", (worse,))
    found = seams.find(range(8, 2049, 8), *SHAPES["E 256"])
    (seam,) = found  # back from it, time falls
    assert (seam.reason, seam.before, seam.tokens) == ("record", 1592, 1600)
    assert seam.jump > 1
    assert seam.tiles[1][0] == "64x16"
    assert seam.tiles[0][0] != "64x16"
    assert str(seam).startswith("1592 -> 1600 tokens: ")
    assert "record (" in str(seam)


def test_a_jump_of_rounds_is_told_from_others(monkeypatch):
    """Of one tile with one width, so that rows alone decide."""
    tile = replace(schedule.TILES[6], widths=(64,), cycles=(400,))
    monkeypatch.setattr(schedule, "TILES", (tile,))
    monkeypatch.setattr(seams, "TILES", (tile,))
    monkeypatch.setattr(measured, "RECORDS", ())
    monkeypatch.setattr(schedule, "MOST_FUSED_ENTRIES", 0)  # a kernel each
    # 66 experts, two tiles of columns each: one round while every expert has 64 rows or fewer.
    assert seams.find((128, 136), 1, 66, 512, 256) == []
    found = seams.find((2048, 3072, 4096), 1, 66, 512, 256)
    assert {seam.reason for seam in found} == {"rounds"}


@pytest.fixture(scope="module")
def picked() -> dict[bool, set[str]]:
    """Names of the tiles that are chosen for the shapes above: with the records, and by the model alone."""
    found: dict[bool, set[str]] = {}
    with pytest.MonkeyPatch.context() as patch:
        for records in (True, False):
            schedule.select.cache_clear()
            if not records:
                patch.setattr(measured, "RECORDS", ())
                patch.setattr(measured, "LAYERS", ())
            found[records] = {
                schedule.TILES[tile].name
                for path in ("a16", "w4a8")
                for top_k, *sizes in SHAPES.values()
                for tokens in (1, 2, 4, *range(8, 2049, 16), 4096, 16384)
                for tile in schedule.select(tokens, top_k, *sizes, path=path)
            }
    schedule.select.cache_clear()
    return found


RECORDED_ONLY = {"64x16", "64x16-3"}  # small layers, whose start and end the model does not have


@pytest.mark.parametrize("records", [True, False])
@pytest.mark.parametrize("tile", [tile.name for tile in schedule.TILES])
def test_every_tile_is_chosen_for_one_of_these_shapes(tile, records, picked):
    assert (tile in picked[records]) == (records or tile not in RECORDED_ONLY)


@pytest.mark.parametrize(("shape", "path"), [("E 12", "a16"), ("E 256", "w4a8")])
def test_the_command_prints_seams(shape, path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["schedule", "2048", *map(str, SHAPES[shape]), "--path", path, "--seams"])
    schedule.main()
    printed = capsys.readouterr().out.splitlines()
    known = KNOWN.get((path, shape))
    if known is None:
        assert printed == ["no jump of more than 5 % beyond the added work"]
    else:
        assert [line.split(" tokens:")[0] for line in printed] == [f"{tokens - 8} -> {tokens}" for tokens in known]
        assert all(f"%, {reason} (" in line for line, reason in zip(printed, known.values(), strict=True))


def test_less_work_explains_nothing():
    assert seams.beyond_work((100.0, 120.0), (50.0, 60.0)) == pytest.approx(0)
    assert seams.beyond_work((100.0, 120.0), (50.0, 40.0)) == pytest.approx(0.2)
    assert seams.beyond_work((100.0, 90.0), (50.0, 50.0)) == pytest.approx(-0.1)


def taken_as_they_come_free(durations: list[float], ctas: int) -> float:
    free = [0.0] * ctas
    for duration in durations:
        heapq.heapreplace(free, free[0] + duration)
    return max(free)


def test_makespan_is_that_of_tiles_taken_one_by_one():
    gen = random.Random(1)
    for _ in range(300):
        at_once = gen.choice([1, 2, 7, 66, 132])
        durations = sorted((gen.randrange(1, 50) for _ in range(gen.randrange(1, 5))), reverse=True)
        tiles = [(float(d), float(gen.randrange(1, 4 * at_once + 2))) for d in durations]
        one_by_one = [duration for duration, number in tiles for _ in range(int(number))]
        got = schedule._makespan(tiles, at_once, 1.0)
        assert got == pytest.approx(taken_as_they_come_free(one_by_one, at_once))
        assert schedule._makespan(tiles, at_once, 0.5) <= got


def test_the_last_round_of_few_ctas_is_short_and_the_first_is_whole():
    assert schedule._makespan([(10.0, 100.0)], 100, 0.5) == 10
    assert schedule._makespan([(10.0, 1.0)], 100, 0.5) == 10
    assert schedule._makespan([(10.0, 150.0)], 100, 0.5) == pytest.approx(10 + 10 * 0.75)
    assert schedule._makespan([(10.0, 100.5)], 100, 1.0) == pytest.approx(15)  # half a chance of one tile more


def test_a_cluster_runs_on_its_sms_together():
    alone = schedule.TILES[6]
    cluster = replace(alone, cluster=2)
    assert (alone.at_once, cluster.at_once) == (132, 66)
    load = schedule.uniform_load(32 * 160, 32)
    times = [schedule._expected(load, tile, 6144, 2048, 36, copied=False) for tile in (alone, cluster)]
    assert times[1].rounds == 2 * times[0].rounds
    assert times[1].even_us == pytest.approx(2 * times[0].even_us)
    assert times[1].us > 1.8 * times[0].us
