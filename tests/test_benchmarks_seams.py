# SPDX-License-Identifier: Apache-2.0
"""The search for jumps in measured times, as far as it runs without a GPU."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm_humming.moe import seams as expected_seams

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
MODULES = ("seams", "layer", "packed_weights", "protocol", "routing")


@pytest.fixture
def script(monkeypatch):
    """benchmarks/seams.py, imported as a script imports its neighbours."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import seams

    assert Path(seams.__file__).parent == BENCHMARKS
    yield seams
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def layer_on_cpu(script, monkeypatch):
    """A NestedLayer without weights whose batches are drawn on the CPU, and the sizes of what was drawn."""
    drawn = []

    def batch(self, tokens, routing):
        drawn.append(tokens)
        gen = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, 16, generator=gen)
        return x, *sys.modules["routing"].route(tokens, self.experts, self.top_k, routing, gen)

    monkeypatch.setattr(script.Layer, "_random_set", lambda self: None)
    monkeypatch.setattr(script.Layer, "batch", batch)
    return lambda shape="seed1", most=256: (script.NestedLayer(shape, torch.bfloat16, "mxfp4", most), drawn)


@pytest.mark.parametrize("routing", ["uniform", "balanced", "zipf", "one-hot"])
def test_neighbours_share_their_tokens(layer_on_cpu, routing):
    layer, drawn = layer_on_cpu()
    x, weights, ids = layer.batch(64, routing)
    for got, more in zip((x, weights, ids), layer.batch(72, routing), strict=True):
        assert got.shape[0] == 64
        assert got.is_contiguous()
        assert torch.equal(got, more[:64])
    assert drawn == [256]
    if routing == "balanced":
        assert set(ids.flatten().bincount().tolist()) == {16}


def test_floors_are_the_schedules(script):
    protocol = sys.modules["protocol"]
    assert protocol.MEMORY_RATE == expected_seams.MEMORY_RATE
    assert protocol.TENSOR_RATE == expected_seams.TENSOR_RATE
    assert protocol.WEIGHT_BYTES["mxfp4"] == protocol.WEIGHT_BYTES["mxfp4_fp8"] == expected_seams.WEIGHT_BYTES


@pytest.mark.parametrize("path", ["a16", "w4a8"])
def test_focus_is_on_jumps_and_changes_of_tiles(script, path):
    for hidden, intermediate, experts, top_k in sys.modules["protocol"].ALL_SHAPES.values():
        sizes = (top_k, experts, hidden, -(-intermediate // 128) * 128)
        expected = script.expected_pairs(sizes, path, 2048)
        assert [(seam.before, seam.tokens) for seam in expected] == [(m, m + 8) for m in range(8, 2048, 8)]
        pairs = script.focused(expected)
        assert len(pairs) == len(set(pairs)) <= 64
        jumps = {(seam.before, seam.tokens): seam.jump for seam in expected}
        assert [jumps[pair] for pair in pairs[:16]] == sorted(jumps.values(), reverse=True)[:16]
        changes = {(seam.before, seam.tokens) for seam in expected if seam.tiles[0] != seam.tiles[1]}
        assert changes <= set(pairs)


def point(tokens, us, work=10.0):
    return {"m": tokens, "us": us, "work_us": work, "tiles": ["256x160", "256x160"], "finite": True}


def test_a_jump_must_be_seen_again(script):
    times = {8: [100.0] * 9, 16: [120.0, 101.0], 24: [121.0, 130.0, 119.0], 32: [122.0]}
    asked = []

    def measure_at(tokens):
        asked.append(tokens)
        return point(tokens, times[tokens].pop(0))

    pairs = [(16, 24), (8, 16), (24, 32)]
    records, left = script.measure_pairs(pairs, measure_at, script.Deadline(None), 0.05)
    assert left == []
    # 16 -> 24 is no jump at first sight; 8 -> 16 is none at the second, which leaves 16 -> 24 as it was judged.
    assert asked == [16, 24, 8, 8, 16, 32]
    assert [(r["before"], r["m"], r["measured"]) for r in records] == [(8, 16, 2), (16, 24, 1), (24, 32, 1)]


def test_a_jump_that_stays_is_kept_with_its_shortest_times(script):
    times = {8: [104.0, 100.0, 103.0], 16: [130.0, 125.0, 126.0]}
    records, _ = script.measure_pairs(
        [(8, 16)], lambda m: point(m, times[m].pop(0), 10.0 if m == 8 else 11.0), script.Deadline(None), 0.05
    )
    (record,) = records
    assert (record["us_before"], record["us"], record["measured"]) == (100.0, 125.0, 3)
    assert record["work"] == 1.1
    assert record["jump"] == round(1.25 / 1.1 - 1, 4)
    assert times == {8: [], 16: []}


def test_the_deadline_leaves_pairs_out_and_says_so(script, capsys):
    deadline = SimpleNamespace(passed=False)

    def measure_at(tokens):
        deadline.passed = tokens == 16
        return point(tokens, 100.0)

    records, left = script.measure_pairs([(8, 16), (16, 24), (24, 32)], measure_at, deadline, 0.05)
    assert [record["m"] for record in records] == [16]
    assert left == [(16, 24), (24, 32)]
    script.print_summary("seed1", records, left, 0.05)
    assert "the deadline left out 2 pairs, the first of them 16 and 24 tokens" in capsys.readouterr().out


def test_a_run_prints_seams_and_writes_them(script, layer_on_cpu, monkeypatch, capsys, tmp_path):
    out = tmp_path / "seams.jsonl"
    monkeypatch.setattr(script, "require_gpu", lambda: None)
    monkeypatch.setattr(script.ops, "load_kernels", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def measure(layer, tokens, routing, tiles):
        assert layer.batch(tokens, routing)[2].shape == (tokens, 8)
        return point(tokens, 100.0 + tokens / 100 + 20.0 * (tokens >= 40))

    monkeypatch.setattr(script, "measure", measure)
    arguments = ["--shapes", "seed1", "--most", "64", "--every", "--fmt", "mxfp4_fp8", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["seams.py", *arguments])
    assert script.main() == 0
    printed = capsys.readouterr().out.splitlines()
    (marked,) = (line for line in printed if "SEAM" in line)
    assert marked.split()[:2] == ["32", "40"]
    assert marked.endswith("SEAM  expected: rounds")
    assert "seed1: 1 of 7 neighbours jump by more than 5 %" in printed[-1]
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["before"], r["m"]) for r in records] == [(m, m + 8) for m in range(8, 64, 8)]
    assert [r["m"] for r in records if r["jump"] > 0.05] == [40]
    assert {r["measured"] for r in records} == {1, 3}
    assert records[3]["expected_jump"] > 0.05


def test_a_result_that_is_not_finite_fails_the_run(script, layer_on_cpu, monkeypatch, capsys):
    monkeypatch.setattr(script, "require_gpu", lambda: None)
    monkeypatch.setattr(script.ops, "load_kernels", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(script, "measure", lambda layer, m, *_: point(m, 100.0) | {"finite": m != 16})
    monkeypatch.setattr("sys.argv", ["seams.py", "--shapes", "gpt-oss-20b", "--most", "24", "--deadline", "0"])
    assert script.main() == 1
    assert "NOT FINITE" in capsys.readouterr().out


@pytest.mark.parametrize("most", ["8", "100", "-16", "x"])
def test_most_must_be_neighbours_apart(script, monkeypatch, capsys, most):
    monkeypatch.setattr("sys.argv", ["seams.py", "--most", most])
    with pytest.raises(SystemExit):
        script.main()
    assert "--most" in capsys.readouterr().err
