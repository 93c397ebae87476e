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


def test_candidates_of_a_sweep_must_run_the_format():
    root = BENCHMARKS.parent
    done = subprocess.run(
        [sys.executable, f"{BENCHMARKS}/layer.py", "--fmt", "mxfp4_fp8", "--sweep-tiles", "--candidates", "64x16"],
        env={"PYTHONPATH": str(root), "PATH": "", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "not all of them are tiles for mxfp4_fp8" in done.stderr


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
    for shape, (hidden, intermediate, _, top_k) in protocol.ALL_SHAPES.items():
        for fmt, byte in protocol.WEIGHT_BYTES.items():
            sets = protocol.weight_sets(shape, fmt)
            assert 2 <= sets <= 24
            assert sets * top_k * 3 * hidden * intermediate * byte > 5 * 60e6 or sets == 24


@pytest.mark.parametrize("script", ["layer.py", "seams.py", "vllm_layer.py", "gemm.py", "roofline.py", "load.py"])
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
    assert "--out" in done.stdout


@pytest.mark.parametrize(
    "script", ["layer.py", "split.py", "seams.py", "vllm_layer.py humming ours", "gemm.py", "load.py"]
)
def test_scripts_say_that_they_need_a_gpu(script):
    root = BENCHMARKS.parent
    done = subprocess.run(
        [sys.executable, *f"{BENCHMARKS}/{script}".split()],
        cwd=root,
        env={"PYTHONPATH": str(root), "PATH": "", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert f"{script.split()[0]} needs an SM90 GPU" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def layer_script(modules):
    import layer

    yield layer
    for name in ("layer", "split", "packed_weights"):
        sys.modules.pop(name, None)


def test_what_a_kernel_adds_is_the_difference_of_ends(layer_script):
    import split

    kernels = ["Memset (Device)", "void a::(anonymous namespace)::b<x::y, 4>(a::P)", "void a::c::kernel<int>(a::P)"]
    assert [split.short_name(name) for name in kernels] == ["Memset", "b", "kernel"]
    layers = [("a", 10.0), ("b", 12.0), ("b", 15.0)]
    events = [(name, end + 100 * i + (i == 2) * 50) for i in range(3) for name, end in layers]
    assert split.steps(events[::-1], 3) == [("a", 120.0), ("b", 2.0), ("b", 3.0)]
    with pytest.raises(ValueError, match="8 kernels are not 3 times the same"):
        split.steps(events[:-1], 3)


def record_of(routing, us, work, shape="seed1", m=64):
    return {"shape": shape, "routing": routing, "m": m, "us": us, "work_us": work}


def test_skewed_routing_is_compared_with_the_work_it_adds(layer_script, capsys):
    uniform = record_of("uniform", 100.0, 50.0)
    skewed = record_of("zipf", 150.0, 60.0)  # 1.5 times as long for 1.2 times the work
    idle = record_of("one-hot", 105.0, 25.0)  # less work explains no time
    assert layer_script.beyond_work(skewed, uniform) == pytest.approx(1.25)
    assert layer_script.beyond_work(idle, uniform) == pytest.approx(1.05)
    assert layer_script.skew_columns(skewed, uniform).split() == ["1.50", "1.20", "+25"]
    assert layer_script.skew_columns(uniform, uniform).strip() == ""
    assert len(layer_script.skew_columns(uniform, uniform)) == len(layer_script.skew_columns(skewed, uniform))
    layer_script.print_skew([uniform, skewed, idle, record_of("zipf", 90.0, 60.0, m=8)])
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        "zipf: at most +25 % beyond what the added work explains (seed1, 64 tokens); more than 10 % at 1 of 1 points",
        "one-hot: at most +5 % beyond what the added work explains (seed1, 64 tokens); more than 10 % at 0 of 1 points",
    ]


def test_work_counts_rows_in_eights(layer_script, monkeypatch):
    protocol = sys.modules["protocol"]
    monkeypatch.setattr(layer_script, "replay_times", lambda run, sets: [10.0, 20.0, 30.0])
    out = torch.zeros(4, 2048)
    monkeypatch.setattr(layer_script, "launcher", lambda layer, inputs, tiles: (None, out))
    ids = torch.tensor([[0, 1], [0, 1], [0, 2], [0, 2]], dtype=torch.int32)
    fake = SimpleNamespace(
        name="shape", fmt="mxfp4", dtype=torch.bfloat16, path="a16", hidden=2048, intermediate=768, top_k=2,
        expert_bytes=1.0, sets=[None], batch=lambda tokens, routing: (out, None, ids),
    )  # fmt: skip
    record = layer_script.measure(fake, 4, "uniform", (0, 0))
    assert (record["us"], record["active"]) == (20.0, 3)
    padded = 3 * 8  # three experts with four, two and two rows
    rate = protocol.TENSOR_RATE["a16"]
    assert record["work_us"] == round(6 * padded * 2048 * 768 / rate * 1e6, 2)
    assert record["floor_us"] == round(6 * 8 * 2048 * 768 / rate * 1e6, 1)


def test_the_split_of_a_step_counts_no_time_twice(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import engine

    def event(name, start, microseconds, cat="kernel"):
        return dict(ph="X", cat=cat, name=name, ts=start, dur=microseconds)

    trace = {
        "traceEvents": [
            event("void vllm_humming::gemm::fused_kernel<C>(P)", 100, 40),
            event("void vllm_humming::reduce_kernel<T>(P)", 110, 35),  # started early, waits until 140
            event("nvjet_tst_64x8", 150, 20),
            event("FlashAttnFwdSm90", 170, 10),
            event("triton_red_fused_rms_norm", 180, 5),
            event("Memcpy DtoH", 190, 2, "gpu_memcpy"),
            event("step", 0, 1000, "user_annotation"),
        ]
    }
    times = engine.times_by_owner(engine.kernels_of(trace))
    found = {name: round(seconds * 1e6, 3) for name, seconds in times.items()}
    assert found == {"experts": 45, "linears": 20, "attention": 10, "other": 7}
    sys.modules.pop("engine")
