# SPDX-License-Identifier: Apache-2.0
"""benchmarks/load.py on the CPU: the tensors it makes load into a layer of this package, and how it reports."""

import importlib
import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from layers import engine

import vllm_humming

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
NAMES = ("protocol", "routing", "vllm_layer", "load_profile", "load")


@pytest.fixture
def load(monkeypatch):
    """The module, imported the way the script imports it; what it sets in the environment is undone."""
    environment = dict(os.environ)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("load")
    for name in NAMES:
        sys.modules.pop(name)
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture(scope="module")
def vllm_engine():
    vllm_humming.register()
    with engine() as config:
        yield config


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4", "mxfp4_fp8"])
def test_a_layer_loads_as_a_model_would_load_it(load, vllm_engine, fmt):
    args = SimpleNamespace(hidden=96, intermediate=160, one="humming", fmt=fmt)
    kinds = [load.checkpoint_tensors(96, 160, fmt, seed) for seed in load.SEEDS]
    layer, seconds = load.prepare(args, 3, kinds, 0, "cpu")
    vllm_engine.compilation_config.static_forward_context.clear()
    assert len(seconds) == 3
    assert all(s >= 0 for s in seconds)
    assert layer.w13_packed.shape[0] == 3
    assert layer.w13_packed.count_nonzero() > layer.w13_packed.numel() / 3  # more than half of it is padding
    assert load.experts_are_equal(layer, 3)
    assert "vllm_humming" in load.method_of(layer)
    layer.w2_packed.data[2, 0, 0, 0] ^= 1
    assert not load.experts_are_equal(layer, 3)
    for param in layer.parameters():
        param.data.copy_(param.data[:1].clone().expand_as(param.data))
    assert not load.experts_are_equal(layer, 3)  # the second expert has the first one's weights


@pytest.mark.parametrize("deferred", [False, True])
def test_the_profile_accounts_for_the_time_of_a_load(load, vllm_engine, deferred):
    kinds = [load.checkpoint_tensors(96, 160, "nvfp4", seed) for seed in load.SEEDS]
    layer = load.make_layer(96, 160, 3, 2, "humming", "nvfp4", "layers.0.experts")
    vllm_engine.compilation_config.static_forward_context.clear()
    layer.quant_method._loader.deferred = deferred
    pack = importlib.import_module("vllm_humming.quant_methods.loading").pack
    lines = load.report(layer, 3, kinds, load.load_experts, "cpu")
    assert importlib.import_module("vllm_humming.quant_methods.loading").pack is pack
    calls = {found[2]: int(found[1]) for line in lines if (found := re.search(r"(\d+) calls  (.*)", line))}
    assert calls["packing, started"] == 6
    assert calls["checks of shapes and dtypes, slices"] == 3 * 9  # codes, scales and a global scale of w1, w2 and w3
    assert calls["the rest of the loader"] == 3 * 12
    assert ("copies to the GPU, started" in calls) == deferred
    if deferred:
        assert calls["copies to the GPU, started"] == 6
        assert calls["findings, with the wait for the GPU"] == 1
    assert sum("GB/s" in line for line in lines) == 3
    assert any("pack_rows" in line or "aten::" in line for line in lines)


def test_steps_share_out_the_time(load):
    steps = importlib.import_module("load_profile").Steps()

    class Work:
        def outer(self):
            self.inner()
            self.inner()
            return 3

        def inner(self):
            time.sleep(0.02)

    original = Work.outer
    with steps.watching([("outer", Work, "outer"), ("inner", Work, "inner")]):
        assert Work().outer() == 3
    assert Work.outer is original
    assert steps.calls == {"outer": 1, "inner": 2}
    assert steps.seconds["inner"] >= 0.04
    assert steps.seconds["outer"] < 0.02


def test_a_tensor_that_nobody_took_is_an_error(load):
    def weight_loader(param, tensor, name, *, shard_id, expert_id, return_success):
        return shard_id != "w3"

    layer = torch.nn.Module()
    layer.layer_name = "layers.0"
    for name in ("w13_weight_packed", "w13_weight_scale", "w2_weight_packed", "w2_weight_scale"):
        param = torch.nn.Parameter(torch.empty(0), requires_grad=False)
        param.weight_loader = weight_loader
        layer.register_parameter(name, param)
    with pytest.raises(RuntimeError, match=r"layers\.0\.0\.w3\.weight_packed was not loaded"):
        load.load_experts(layer, [load.checkpoint_tensors(32, 32, "mxfp4")], 1)


def test_records_are_means_and_peaks_and_the_table_compares_them(load):
    args = SimpleNamespace(label="vllm-humming", fmt="mxfp4", experts=4, hidden=96, intermediate=160)
    gib = load.GIB
    ours = load.record(args, [[0.1, 1.0, 0.2], [0.3, 2.0, 0.4]], [6 * gib, 7 * gib], 5 * gib)
    assert (ours["build_s"], ours["load_s"], ours["process_s"], ours["seconds"]) == (0.2, 1.5, 0.3, 2.0)
    assert ours["seconds_each"] == [1.3, 2.7]
    assert (ours["peak_gib"], ours["held_gib"], ours["beyond_gib"]) == (7.0, 5.0, 2.0)
    marlin = ours | {"label": "marlin", "seconds": 3.0, "peak_gib": 10.5, "equal": False}
    _, first, second = load.table([ours | {"equal": True}, marlin])
    assert first.endswith("1.50, 1.50")
    assert second.endswith("1.00, 1.00  EXPERTS DIFFER")
    _, alone = load.table([ours | {"equal": True}])
    assert alone.endswith("-")


def test_each_contestant_runs_in_a_process_of_its_own(load, monkeypatch, capsys):
    started = []

    def run(command, env, **rest):
        started.append((command, env.get("VLLM_PLUGINS")))
        failed = "marlin" in command
        return SimpleNamespace(returncode=int(failed), stdout='a log line\n{"seconds": 1.0}\n')

    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr(load.subprocess, "run", run)
    args = SimpleNamespace(experts=256, hidden=7168, intermediate=2048, repeats=2, profile=False)
    assert load.contestant(args, "vllm-humming", "nvfp4") == {"seconds": 1.0}
    assert load.contestant(args, "marlin", "nvfp4") is None
    assert "FAIL marlin nvfp4: exit status 1" in capsys.readouterr().out
    (ours, plugins), (marlin, no_plugins) = started
    assert plugins is None
    assert no_plugins == ""
    assert ours[2:8] == ["--one", "humming", "--label", "vllm-humming", "--fmt", "nvfp4"]
    assert marlin[3] == "compressed-tensors"
    assert ours[8:] == ["--experts", "256", "--hidden", "7168", "--intermediate", "2048", "--repeats", "2"]
