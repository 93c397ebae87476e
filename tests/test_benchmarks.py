# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share, as far as it runs without a GPU."""

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def modules(monkeypatch):
    """protocol and routing, imported the way the scripts import them."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import protocol
    import routing

    yield protocol, routing
    for name in ("protocol", "routing"):
        sys.modules.pop(name)


@pytest.mark.parametrize("kind", ["uniform", "balanced", "zipf", "one-hot"])
def test_routing_does_not_depend_on_the_default_dtype(modules, kind):
    def routed():
        weights, ids = modules[1].route(40, 16, 4, kind, torch.Generator().manual_seed(7))
        return weights, ids

    want = routed()
    torch.set_default_dtype(torch.bfloat16)  # as vLLM does while it builds a model
    try:
        found = routed()
    finally:
        torch.set_default_dtype(torch.float32)
    assert want[0].dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(want, found, strict=True))
    assert torch.allclose(want[0].sum(-1), torch.ones(40))
    assert all(len(set(row)) == 4 for row in want[1].tolist())


def test_replays_are_timed_one_by_one_a_layer(modules, monkeypatch):
    protocol, _ = modules
    clock, calls = iter(range(1, 1000)), []
    graph = SimpleNamespace(replay=lambda: calls.append("replay"))

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = next(clock)

        def elapsed_time(self, other):
            return float(other.at - self.at)

    fake = {"synchronize": lambda: None, "CUDAGraph": lambda: graph, "graph": lambda g: nullcontext(), "Event": Event}
    for name, value in fake.items():
        monkeypatch.setattr(torch.cuda, name, value)
    times = protocol.replay_times(lambda: calls.append("run"), 4)
    assert times == [250.0] * protocol.REPLAYS  # one millisecond over four layers
    assert calls == ["run", "run"] + ["replay"] * protocol.REPLAYS


def test_weight_sets_exceed_l2(modules):
    protocol, _ = modules
    for shape, (hidden, intermediate, _, top_k) in protocol.SHAPES.items():
        for fmt, byte in protocol.WEIGHT_BYTES.items():
            sets = protocol.weight_sets(shape, fmt)
            assert 2 <= sets <= 24
            assert sets * top_k * 3 * hidden * intermediate * byte > 5 * 60e6 or sets == 24


@pytest.mark.parametrize("script", ["layer.py", "vllm_layer.py"])
def test_scripts_start(script):
    root = BENCHMARKS.parent
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), "--help"],
        cwd=root,
        env={"PYTHONPATH": str(root), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "--routing" in done.stdout
