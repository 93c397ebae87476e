# SPDX-License-Identifier: Apache-2.0
"""benchmarks/gemm.py and roofline.py, as far as they run without a GPU: rows, records, tables, deadlines."""

import importlib
import json
import sys
import types
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm_humming.moe import reference, schedule

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
NAMES = ("protocol", "routing", "packed_weights", "contestants", "gemm", "roofline")


@pytest.fixture
def bench(monkeypatch):
    """The modules of NAMES, imported the way the scripts import them."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    for name in NAMES:
        sys.modules.pop(name)


def rows(bench, *, gathered=True, tokens=7, experts=5, top_k=2, k=256, n=64, routing="uniform"):
    gemm = bench.contestants.Gemm("set", "up" if gathered else "down", n, k, experts, top_k, gathered)
    return bench.contestants.Rows(gemm, tokens, routing, device="cpu")


@pytest.mark.parametrize("gathered", [True, False])
def test_rows_are_sorted_by_expert_and_read_their_own_source(bench, gathered):
    r = rows(bench, gathered=gathered)
    flat = r.ids.flatten()
    assert r.total == 14
    assert flat[r.slots].tolist() == sorted(flat.tolist())
    assert r.offsets.tolist() == [int((flat < e).sum()) for e in range(6)]
    assert r.active == flat.unique().numel()
    for row, slot in enumerate(r.slots.tolist()):
        source = r.x[slot // 2 if gathered else slot]
        assert torch.equal(r.x_sorted[row], source)
    assert r.x.shape == ((7 if gathered else 14), 256)
    assert r.flops == 2 * 14 * 64 * 256


@pytest.mark.parametrize("block", [1, 4, 16])
def test_aligned_lists_hold_each_slot_once_in_blocks_of_its_expert(bench, block):
    r = rows(bench, tokens=20, experts=9, top_k=3)
    slots, experts, padded = r.aligned(block)
    assert int(padded) == len(slots) == block * len(experts)
    assert slots.dtype == experts.dtype == torch.int32
    seen = []
    for expert, chunk in zip(experts.tolist(), slots.view(-1, block).tolist(), strict=True):
        own = [slot for slot in chunk if slot < r.total]
        assert own, "no block is all padding"
        assert chunk == own + [r.total] * (block - len(own))
        assert all(int(r.ids.flatten()[slot]) == expert for slot in own)
        seen += own
    assert sorted(seen) == list(range(r.total))


def test_fp8_rows_stay_with_their_scales(bench):
    r = rows(bench)
    values, scales = r.x_fp8_sorted
    decoded = values.float() * scales.repeat_interleave(128, 1)
    assert torch.allclose(decoded, r.x_sorted.float(), rtol=0.07, atol=0.02)
    turned = bench.contestants.m_major(scales)
    assert torch.equal(turned, scales)
    assert turned.stride() == (1, 16)  # 14 rows in whole fours


def test_peers_that_are_not_installed_are_left_out_with_a_reason(bench, monkeypatch):
    monkeypatch.setitem(sys.modules, "humming", None)
    gemm = bench.contestants.SETS["seed1"][0]
    options = bench.contestants.Options(device="cpu")
    with pytest.raises(bench.contestants.LeftOut, match="humming does not import"):
        bench.contestants.humming(gemm, "mxfp4", options)
    with pytest.raises(bench.contestants.LeftOut, match="no FP8 activations"):
        bench.contestants._marlin_weights(gemm, "mxfp4_fp8", "cpu")
    odd = bench.contestants.SETS["gpt-oss-20b"][1]
    with pytest.raises(bench.contestants.LeftOut, match="no tiles for N 2880, K 2880"):
        bench.contestants._marlin_weights(odd, "mxfp4", "cpu")
    with pytest.raises(bench.contestants.LeftOut, match="8-bit"):
        bench.contestants.deepgemm(gemm, "mxfp4", options)


@pytest.fixture
def operators(bench, monkeypatch):
    """torch.ops.vllm_humming with a grouped_gemm that records its calls and answers with the reference."""
    calls = []
    projection = {}
    make = bench.contestants.random_projection

    def kept(*args, **kwargs):
        projection["weights"] = make(*args, **kwargs)
        return projection["weights"]

    def grouped_gemm(x, x_scale, packed, row_scale, bias, groups, source, workspace, out, layout, fmt, tile):
        calls.append(
            SimpleNamespace(x=x, x_scale=x_scale, groups=groups, rows=source, layout=layout, fmt=fmt, tile=tile)
        )
        values = x.float() if x_scale is None else x.float() * x_scale.repeat_interleave(128, 1)
        values = values if source is None else values[source]
        bounds = [0, len(values)] if groups is None else groups.tolist()
        for expert, (start, stop) in enumerate(pairwise(bounds)):
            weight, scale, _ = unpack(projection["weights"], expert, out.shape[1], values.shape[1])
            out[start:stop] = (values[start:stop] @ weight.T * scale).to(out.dtype)

    def unpack(weights, expert, n, k):
        return reference.unpack_unscaled(weights, expert, dtype=torch.bfloat16, k=k, out_features=n, gated=False)

    fake = SimpleNamespace(grouped_gemm=grouped_gemm, grouped_gemm_workspace_bytes=lambda *sizes: 16)
    monkeypatch.setattr(bench.contestants, "random_projection", kept)
    monkeypatch.setattr(bench.contestants, "torch", FakeTorch(fake))
    if importlib.util.find_spec("vllm_humming.moe.layouts") is None:
        layouts = SimpleNamespace(GemmLayout={"CONTIGUOUS": 0, "INDEXED": 2})
        monkeypatch.setitem(sys.modules, "vllm_humming.moe.layouts", layouts)
    return calls


class FakeTorch:
    """torch, with other operators."""

    def __init__(self, operators):
        self.ops = SimpleNamespace(vllm_humming=operators)

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4", "mxfp4_fp8"])
@pytest.mark.parametrize("gathered", [True, False])
def test_both_layouts_compute_the_same_rows(bench, operators, fmt, gathered):
    r = rows(bench, gathered=gathered)
    calls = list(bench.contestants.ours(r.gemm, fmt, bench.contestants.Options(device="cpu", m_major=True))(r))
    assert [call.label for call in calls] == ["ours-contiguous", "ours-indexed"]
    for call in calls:
        assert bench.gemm.first_call(call)[1]
    assert torch.equal(calls[0].out, calls[1].out)
    assert [call.layout for call in operators] == [0, 2]
    assert operators[0].rows is None
    assert operators[1].x.shape[0] == r.x.shape[0]
    path = "w4a8" if fmt == "mxfp4_fp8" else "a16"
    assert {schedule.TILES[call.tile].path for call in operators} == {path}
    assert calls[0].weight_bytes == r.active * 64 * 256 * bench.protocol.WEIGHT_BYTES[fmt]


def test_a_sweep_has_every_tile_and_marks_the_selected_one(bench, operators):
    r = rows(bench)
    options = bench.contestants.Options(device="cpu", tiles="sweep")
    calls = list(bench.contestants.ours(r.gemm, "mxfp4", options)(r))
    every = [schedule.TILES[tile].name for tile in schedule.tiles_of("a16")]
    assert sorted(call.tile for call in calls) == sorted(every * 2)
    selected = [call.tile for call in calls if call.role == "ours"]
    chosen = [schedule.select_gemm(14, 5, 64, 256, gathered=gathered) for gathered in (False, True)]
    assert selected == [schedule.TILES[tile].name for tile in chosen]
    forced = bench.contestants.Options(device="cpu", tiles=2)
    calls = list(bench.contestants.ours(r.gemm, "mxfp4", forced)(r))
    assert [(call.tile, call.role) for call in calls] == [(schedule.TILES[2].name, "ours")] * 2


def test_a_linear_layer_is_one_expert_without_groups(bench, operators):
    gemm = bench.contestants.Gemm("linear", "64x256", 64, 256)
    r = bench.contestants.Rows(gemm, 3, "uniform", device="cpu")
    (call,) = bench.contestants.ours(gemm, "mxfp4", bench.contestants.Options(device="cpu"))(r)
    assert bench.gemm.first_call(call)[1]
    assert call.label == "ours"
    assert operators[0].groups is None
    assert torch.equal(operators[0].x, r.x)


def expected_rows(r):
    """slot -> the sum of the row of x that it reads, and its expert."""
    x = r.x.float().sum(1)
    slots = range(r.total)
    return {
        slot: (float(x[slot // r.gemm.top_k if r.gemm.gathered else slot]), int(r.ids.flatten()[slot]))
        for slot in slots
    }


def put(out, row, value, expert):
    """What the stand-ins of the peers' kernels compute: the sum of the row of x and the expert."""
    out.view(-1, out.shape[-1])[row, 0], out.view(-1, out.shape[-1])[row, 1] = value, expert


def module(monkeypatch, name, **content):
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        path = ".".join(parts[:i])
        monkeypatch.setitem(sys.modules, path, sys.modules.get(path) or types.ModuleType(path))
        if i > 1:
            monkeypatch.setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], sys.modules[path], raising=False)
    for key, value in content.items():
        monkeypatch.setattr(sys.modules[name], key, value, raising=False)


@pytest.mark.parametrize("gathered", [True, False])
def test_humming_gets_the_rows_of_each_expert(bench, monkeypatch, gathered):
    block = 4

    class Layer(torch.nn.Module):
        humming_config = "config"

        def __init__(self, *, shape_n, shape_k, num_experts, weight_config, input_config, torch_dtype):
            super().__init__()
            assert (shape_n, shape_k, num_experts) == (64, 256, 5)
            self.weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.int32), requires_grad=False)

        def transform(self):
            self.transformed = bool(self.weight.any())

        def forward(self, inputs, outputs, input_scale, compute_config, tuning_config, top_k, **lists):
            assert self.transformed
            assert json.loads(tuning_config) == {"block_shape": [block, 256, 128]}
            kind = json.loads(compute_config)["gemm_type"]
            x = inputs.float().sum(1)
            if kind == "indexed":
                for i, slot in enumerate(lists["sorted_ids"][: int(lists["num_tokens_padded"])].tolist()):
                    if slot < len(outputs):
                        put(outputs, slot, x[slot // top_k], lists["expert_ids"][i // block])
            else:
                for expert, (start, stop) in enumerate(pairwise(lists["expert_layout"].tolist())):
                    for row in range(start, stop):
                        put(outputs, row, x[row], expert)

    def configuration(config, *, shape_m, gemm_type, use_m_major_input_scale):
        assert (config, shape_m, use_m_major_input_scale) == ("config", 14, False)
        return {"block_shape": [block, 256, 128]}

    module(monkeypatch, "humming.ops")
    module(monkeypatch, "humming.layer", HummingLayer=Layer)
    module(monkeypatch, "humming.tune", get_heuristics_config=configuration)
    r = rows(bench, gathered=gathered)
    indexed, grouped = bench.contestants.humming(r.gemm, "mxfp4", bench.contestants.Options(device="cpu"))(r)
    assert (indexed.label, grouped.label) == ("humming-indexed", "humming-grouped")
    indexed.run()
    grouped.run()
    for slot, (value, expert) in expected_rows(r).items():
        row = r.slots.tolist().index(slot)
        for out, place in ((indexed.out, slot), (grouped.out, row)):
            assert float(out[place, 0]) == pytest.approx(value, rel=1e-2, abs=0.1)
            assert int(out[place, 1]) == expert


@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
def test_marlin_gets_the_rows_of_each_expert(bench, monkeypatch, gathered, fmt):
    r = rows(bench, gathered=gathered)

    def gemm(x, out, codes, bias, scales, a_scales, factors, zeros, g_idx, perm, workspace, slots, experts, padded,
             weights, *, moe_block_size, top_k, size_m, size_n, size_k, mul_topk_weights, **rest):  # fmt: skip
        assert codes.shape == (5, size_k // 16, 2 * size_n)
        assert scales.shape == (5, size_k // (32 if fmt == "mxfp4" else 16), size_n)
        assert (factors is None) == (fmt == "mxfp4")
        assert (size_m, moe_block_size, mul_topk_weights) == (len(x), 8, False)
        for i, slot in enumerate(slots[: int(padded)].tolist()):
            if slot < size_m * top_k:
                put(out, slot, x.float().sum(1)[slot // top_k], experts[i // moe_block_size])

    base = "vllm.model_executor.layers"
    align = lambda ids, block, experts: r.aligned(block)  # noqa: E731
    module(monkeypatch, "vllm._custom_ops", moe_wna16_marlin_gemm=gemm)
    module(monkeypatch, f"{base}.fused_moe.moe_align_block_size", moe_align_block_size=align)
    utils = f"{base}.quantization.utils"
    module(monkeypatch, f"{utils}.marlin_utils", marlin_make_workspace_new=lambda device, blocks: None)
    module(monkeypatch, f"{utils}.marlin_utils_fp4", apply_fp4_marlin_linear=None)
    module(monkeypatch, "vllm.scalar_type", scalar_types=SimpleNamespace(float4_e2m1f=None))
    (call,) = bench.contestants.marlin(r.gemm, fmt, bench.contestants.Options(device="cpu"))(r)
    call.run()
    for slot, (value, expert) in expected_rows(r).items():
        assert float(call.out[slot, 0]) == pytest.approx(value, rel=1e-2, abs=0.1)
        assert int(call.out[slot, 1]) == expert


def test_deepgemm_gets_padded_rows_and_their_experts(bench, monkeypatch):
    height = 8

    def gemm(left, right, out, row_experts, disable_ue8m0_cast):
        (x, scales), (weights, weight_scales) = left, right
        assert weights.shape == (5, 128, 256)
        assert weight_scales.shape == (5, 1, 2)
        sums = (x.float() * scales.repeat_interleave(128, 1)).sum(1)
        for row, expert in enumerate(row_experts.tolist()):
            put(out, row, sums[row], expert)

    content = dict(get_mk_alignment_for_contiguous_layout=lambda: height, m_grouped_fp8_gemm_nt_contiguous=gemm)
    module(monkeypatch, "deep_gemm", get_mn_major_tma_aligned_tensor=lambda scales: scales, **content)
    r = rows(bench, n=128)
    (call,) = bench.contestants.deepgemm(r.gemm, "mxfp4_fp8", bench.contestants.Options(device="cpu"))(r)
    call.run()
    expected = expected_rows(r)
    found = call.out[call.valid].float()
    assert len(found) == r.total
    for row, slot in enumerate(r.slots.tolist()):
        assert float(found[row, 0]) == pytest.approx(expected[slot][0], rel=0.1, abs=1.5)
        assert int(found[row, 1]) == expected[slot][1]


def test_cublas_is_as_many_rows_with_one_weight(bench):
    r = rows(bench)
    (call,) = bench.contestants.cublas(r.gemm, "mxfp4", bench.contestants.Options(device="cpu"))(r)
    assert call.run().shape == (r.total, r.gemm.n)
    assert call.weight_bytes == 2 * r.gemm.n * r.gemm.k


@pytest.mark.parametrize("valid", [None, torch.tensor([True, False, True])])
def test_a_row_that_nobody_wrote_is_seen(bench, valid):
    out = torch.zeros(3, 4)

    def run():
        out[0] = out[2] = 1.0

    call = bench.contestants.Call("label", "peer", run, 1.0, out, valid)
    assert bench.gemm.first_call(call)[1] == (valid is not None)


def test_times_are_cold_and_the_host_does_not_wait(bench, monkeypatch):
    log = []
    clock = iter(range(1000))

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = next(clock)
            log.append("event")

        def elapsed_time(self, other):
            return float(other.at - self.at)

    graph = SimpleNamespace(replay=lambda: log.append("replay"))

    class Capture:
        def __init__(self, graph):
            log.append("capture")

        def __enter__(self):
            pass

        def __exit__(self, *exception):
            pass

    for name, value in {
        "CUDAGraph": lambda: graph, "graph": Capture, "Event": Event, "synchronize": lambda: log.append("wait"),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    times = bench.protocol.cold_times(lambda: log.append("run"), lambda: log.append("flush"))
    calls = bench.protocol.COLD_CALLS
    assert times == [1000.0] * calls
    assert log == ["capture", "run", "replay", "wait"] + ["flush", "event", "replay", "event"] * calls + ["wait"]
    log.clear()
    bench.protocol.cold_times(lambda: log.append("run"), lambda: log.append("flush"), eager=True)
    assert log == ["run", "wait"] + ["flush", "event", "run", "event"] * calls + ["wait"]


class Stand:
    """A contestant whose calls take a given time and write everything; fails: "call", "left out", or what to do."""

    def __init__(self, label, role, us, fails=None):
        self.label, self.role, self.us, self.fails = label, role, us, fails

    def __call__(self, bench):
        def build(gemm, fmt, options):
            if self.fails == "left out":
                raise bench.contestants.LeftOut("not installed")

            def calls(r):
                if self.fails == "call":
                    raise RuntimeError("no kernel")
                out = torch.empty(r.total, gemm.n)

                def run():
                    out.fill_(1.0)
                    if callable(self.fails):
                        self.fails()

                run.us = self.us
                yield bench.contestants.Call(self.label, self.role, run, 100.0, out, version="1.0")

            return calls

        return build


@pytest.fixture
def measured(bench, monkeypatch):
    """main() on the CPU with stand-ins; returns (exit status, records)."""

    def main(stands, arguments, tmp_path):
        contestants = {name: stand(bench) for name, stand in stands.items()}
        monkeypatch.setattr(bench.gemm, "CONTESTANTS", contestants)
        monkeypatch.setattr(bench.gemm, "SETS", {"set": [bench.contestants.Gemm("set", "up", 64, 256, 5, 2)]})
        monkeypatch.setattr(bench.gemm, "Options", lambda *args: bench.contestants.Options(*args, device="cpu"))
        monkeypatch.setattr(bench.gemm, "FLUSH_BYTES", 16)
        monkeypatch.setattr(bench.gemm, "cold_times", lambda run, flush, eager=False: [getattr(run, "us", 1.0)] * 3)
        monkeypatch.setattr(bench.gemm.ops, "load_kernels", lambda: None)
        monkeypatch.setattr(bench.gemm, "require_gpu", lambda: None)
        zeros = torch.zeros
        monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **rest: zeros(*size, **rest))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
        out = tmp_path / "out.jsonl"
        status = bench.gemm.main(["--sets", "set", "--peers", *stands, "--out", str(out), *arguments])
        return status, [json.loads(line) for line in out.read_text().splitlines()]

    return main


STANDS = {
    "ours": Stand("ours-indexed", "ours", 10.0),
    "humming": Stand("humming-indexed", "peer", 15.0),
    "marlin": Stand("marlin", "peer", 12.0),
    "cublas": Stand("cublas-bf16", "roof", 8.0),
}


def test_a_run_prints_a_table_and_writes_records(measured, capsys, tmp_path):
    arguments = ["--formats", "mxfp4", "--ms", "4", "2"]
    status, records = measured(STANDS, arguments, tmp_path)
    assert status == 0
    assert [(r["m"], r["label"], r["x"]) for r in records[:4]] == [
        (4, "ours-indexed", 1.2), (4, "humming-indexed", 0.8), (4, "marlin", 1.0), (4, "cublas-bf16", 1.5),
    ]  # fmt: skip
    assert [r["m"] for r in records] == [4] * 4 + [2] * 4
    mine = records[0]
    assert mine["rows"] == 8
    assert mine["finite"]
    assert mine["timing"] == "graph"
    assert mine["tflops"] == round(2 * 8 * 64 * 256 / 10 / 1e6, 1)
    read = mine["active"] * 64 * 256 * 17 / 32 + 4 * 256 * 2 + 8 * 64 * 2
    assert mine["floor_us"] == round(read / 4.3e12 * 1e6, 2)
    assert mine["flop_per_byte"] == round(2 * 8 * 64 * 256 / (100 + 4 * 256 * 2 + 8 * 64 * 2), 2)
    printed = capsys.readouterr().out
    assert "set up N 64 K 256 mxfp4 M 4, uniform: 8 rows" in printed
    assert (
        "mxfp4: best peer / ours: geometric mean 1.20, worst 1.20 (set up uniform 2), below 0.97 at 0 of 2" in printed
    )
    assert (
        "mxfp4: cublas-bf16 / ours: geometric mean 0.80, worst 0.80 (set up uniform 2), below 0.97 at 2 of 2" in printed
    )


def test_a_failure_costs_only_its_contestant(measured, capsys, tmp_path):
    stands = STANDS | {"humming": Stand("", "peer", 0, "call"), "marlin": Stand("", "peer", 0, "left out")}
    status, records = measured(stands, ["--formats", "mxfp4", "nvfp4", "--ms", "4"], tmp_path)
    assert status == 1
    assert [(r["label"], r["x"]) for r in records] == [("ours-indexed", None), ("cublas-bf16", None)] * 2
    printed = capsys.readouterr().out
    assert "FAIL humming set up mxfp4 uniform M 4: RuntimeError: no kernel" in printed
    assert printed.count("left out: marlin: not installed") == 1


def test_a_deadline_keeps_what_was_measured(measured, bench, monkeypatch, capsys, tmp_path):
    now = [0.0]
    monkeypatch.setattr(bench.protocol, "time", SimpleNamespace(monotonic=lambda: now[0]))
    stands = STANDS | {"humming": Stand("humming-indexed", "peer", 15.0, lambda: now.__setitem__(0, 5.0))}
    status, records = measured(stands, ["--formats", "mxfp4", "--ms", "4", "2", "--deadline", "5"], tmp_path)
    assert status == 0
    assert [(r["m"], r["label"], r["x"]) for r in records] == [(4, "ours-indexed", 1.5), (4, "humming-indexed", 1.0)]
    assert "DEADLINE" in capsys.readouterr().out


def test_capture_that_fails_is_timed_eagerly_for_peers_only(bench, monkeypatch):
    def cold(run, flush, eager=False):
        if not eager:
            raise RuntimeError("operation not permitted when stream is capturing")
        return [3.0]

    monkeypatch.setattr(bench.gemm, "cold_times", cold)
    r = rows(bench)
    out = torch.empty(1)

    def call(role):
        return bench.contestants.Call("label", role, lambda: out.fill_(0.0), 1.0, out)

    assert bench.gemm.measure(call("peer"), r, "mxfp4", None)["timing"] == "eager"
    with pytest.raises(RuntimeError, match="capturing"):
        bench.gemm.measure(call("ours"), r, "mxfp4", None)


def test_compiling_processes_get_the_points_of_their_set(bench):
    args = bench.gemm.parse(["--sets", "seed1", "linear", "--ms", "8", "1", "--jobs", "2", "--m-major"])
    command = bench.gemm.compile_command(args, "linear", "nvfp4", 30.4)
    child = bench.gemm.parse(command[2:])
    assert (child.sets, child.formats, child.ms) == (["linear"], ["nvfp4"], [8, 1])
    assert child.compile_only
    assert child.m_major
    assert child.deadline == 30
    assert child.peers == list(bench.contestants.COMPILING)
    assert child.jobs == 0


@pytest.mark.parametrize("arguments", [["--tiles", "64x17"], ["--tiles", "64x16", "--formats", "mxfp4_fp8"]])
def test_tiles_that_do_not_fit_are_refused(bench, arguments, capsys):
    with pytest.raises(SystemExit):
        bench.gemm.parse(arguments)
    assert "tile" in capsys.readouterr().err


def test_sets_are_those_of_the_layers(bench):
    for name, (hidden, intermediate, experts, top_k) in bench.protocol.SHAPES.items():
        up, down = bench.contestants.SETS[name]
        assert (up.n, up.k, down.n, down.k) == (2 * intermediate, hidden, hidden, intermediate)
        assert {(g.experts, g.top_k) for g in (up, down)} == {(experts, top_k)}
        assert up.gathered
        assert not down.gathered
    assert all(g.is_linear for g in bench.contestants.SETS["linear"])


RECORDS = [
    {"label": "ours", "fmt": "mxfp4", "set": "s", "gemm": "up", "m": 8, "us": 1.0, "tflops": 10.0, "gbps": 99.0,
     "flop_per_byte": 4.0, "role": "ours"},
    {"label": "ours", "fmt": "mxfp4", "set": "s", "gemm": "up", "m": 8, "us": 2.0, "tflops": 5.0, "gbps": 50.0,
     "flop_per_byte": 4.0, "role": "sweep"},
    {"peer": "marlin", "shape": "seed1", "m": 64, "us": 9.0, "tflops": 300.0, "gbps": 1000.0},
    {"label": "fp8", "fmt": "mxfp4_fp8", "shape": "seed1", "m": 64, "us": 9.0, "tflops": 300.0, "gbps": 1000.0},
    {"meta": {"date": "today"}},
]  # fmt: skip


def test_roofline_reads_gemms_and_layers(bench, tmp_path):
    file = tmp_path / "records.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    points = bench.roofline.read_records([file], None, None)
    assert [(p["label"], p["shape"], p["x"], p["y"]) for p in points] == [
        ("ours", "s up", 4.0, 10.0), ("marlin", "seed1", 300.0, 300.0), ("fp8", "seed1", 300.0, 300.0),
    ]  # fmt: skip
    assert [p["label"] for p in bench.roofline.read_records([file], ["mxfp4"], ["marlin"])] == ["marlin"]
    assert [name for name, _, _ in bench.roofline.roofs(points)] == ["a16", "w4a8"]
    assert bench.roofline.roofs(points[:1]) == [("a16", 690.0, 690e12 / 4.3e12)]
    file.write_text('{"label": "a", "shape": "b", "m": 1, "us": 2.0}\n')
    with pytest.raises(ValueError, match=r"records\.jsonl, line 1: a measurement needs tflops and gbps"):
        bench.roofline.read_records([file], None, None)


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_roofline_draws(bench, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    file = tmp_path / "records.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    picture = tmp_path / f"roof.{suffix}"
    bench.roofline.draw(bench.roofline.read_records([file], None, None), picture, "a title")
    head = picture.read_bytes()[:200]
    assert (b"<svg" in picture.read_bytes()) if suffix == "svg" else head.startswith(b"\x89PNG")
