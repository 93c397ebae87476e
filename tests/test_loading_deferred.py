# SPDX-License-Identifier: Apache-2.0
"""What loading leaves to a GPU: deferred findings, staged host tensors, and how little the host does for an expert."""

import random
import threading
import time
from collections import Counter
from weakref import WeakValueDictionary

import pytest
import torch
from layers import (
    CT_MXFP4,
    CT_NVFP4,
    GPT_OSS,
    Experts,
    Sizes,
    build,
    engine,
    finish,
    load_one,
    load_split,
    load_stacked,
)
from test_loading import GPT_OSS_LAYER, NAME, NVFP4_SIZES, SIZES, check_layer
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_humming.moe import packing
from vllm_humming.moe.weight_formats import MXFP4, NVFP4
from vllm_humming.quant_methods import staging
from vllm_humming.quant_methods.staging import Staging, staging_of

CPU = torch.device("cpu")
FP8 = {"humming": {"activation": "fp8"}}


def deferred(checkpoint, sizes, *, additional=None, **kwargs):
    """A layer that loads as one on a GPU does."""
    with engine(additional=additional):
        layer = build(checkpoint, sizes, **kwargs)
    layer.quant_method._loader.deferred = True
    return layer


@pytest.fixture
def layer():
    return deferred(CT_MXFP4, SIZES)


# Findings are read with the last expert


@pytest.mark.parametrize("checkpoint", [CT_MXFP4, CT_NVFP4, GPT_OSS])
def test_deferred_layers_hold_the_same_weights(checkpoint):
    fmt = NVFP4 if checkpoint is CT_NVFP4 else MXFP4
    sizes, stacked = NVFP4_SIZES if fmt is NVFP4 else SIZES, checkpoint is GPT_OSS
    layer = deferred(checkpoint, sizes, **(GPT_OSS_LAYER if stacked else {}))
    experts = Experts(sizes, fmt=fmt, bias=stacked)
    (load_stacked if stacked else load_split)(layer, experts)
    finish(layer)
    check_layer(layer, experts, interleaved=stacked)


def refused_at_the_end(layer, experts, message, *, bad):
    """The load raises with the last tensor only, naming what is wrong; expert `bad` keeps zero weights."""
    loaded = []
    load = layer.quant_method._loader.load

    def watched(*args):
        load(*args)
        loaded.append(args)

    layer.quant_method._loader.load = watched
    tensors = sum(kind != "unused" for _, kind in layer.quant_method.scheme.tensors if kind != "bias") * 3 * 4
    with pytest.raises(ValueError, match=message):
        load_split(layer, experts)
    assert sum(args[1] != "unused" for args in loaded) == tensors - 1  # the last one's raised
    projection, expert = bad
    assert not getattr(layer, f"{projection}_packed")[expert, ..., :4096].any()
    with pytest.raises(ValueError, match=rf"{NAME}: the checkpoint lacks .*expert {expert} "):
        finish(layer)  # and nothing half-loaded serves
    assert layer.quant_method._loader is not None


def test_a_nan_scale_is_named_with_its_tensor_and_row(layer):
    experts = Experts(SIZES)
    experts.scales["w13"][1, 160 + 7, 2] = 255  # rows of gate come before those of up
    message = rf"^{NAME}: expert 1: w3 scale of row 7, group 2 is the e8m0 NaN \(255\), expected 0\.\.254"
    refused_at_the_end(layer, experts, message, bad=("w13", 1))


def test_a_negative_scale_is_named_with_its_value():
    experts = Experts(NVFP4_SIZES, fmt=NVFP4)
    experts.scales["w2"][2, 5, 12] = 0xB8
    message = rf"^{NAME}: expert 2: w2 scale of row 5, group 12 is -1\.0 \(byte 0xb8\), expected an e4m3 number"
    refused_at_the_end(deferred(CT_NVFP4, NVFP4_SIZES), experts, message, bad=("w2", 2))


def test_a_row_that_no_window_holds_is_named_with_its_span(layer):
    experts = Experts(SIZES)
    experts.codes["w13"][2, 161] = 0x11
    experts.scales["w13"][2, 161] = torch.tensor([200, 3, 130])
    message = rf"^{NAME}: expert 2: w13 row 161: scale exponents -124\.\.73 span 197, more than the 133 that bfloat16"
    refused_at_the_end(layer, experts, message, bad=("w13", 2))


def test_a_global_scale_out_of_range_is_named_with_its_value():
    experts = Experts(NVFP4_SIZES, fmt=NVFP4)
    experts.globals["w13"][3, 1] = 2.0**120
    message = rf"^{NAME}: expert 3: w13 global scale must be in 2\^-135\.\.2\^119, .*, found 1\.3\d+e\+36"
    refused_at_the_end(deferred(CT_NVFP4, NVFP4_SIZES), experts, message, bad=("w13", 3))


def test_a_bias_that_is_not_finite_is_named():
    layer = deferred(GPT_OSS, SIZES, **GPT_OSS_LAYER)
    experts = Experts(SIZES, bias=True)
    experts.bias["w2"][1, 5] = float("inf")
    with pytest.raises(ValueError, match=rf"^{NAME}: expert 1: w2_bias holds NaN or infinity"):
        load_stacked(layer, experts)
    with pytest.raises(ValueError, match=r"lacks 3 tensors.*expert 1 w2_weight, expert 1 w2_weight_scale, expert 1"):
        finish(layer)


def test_every_bad_expert_stays_refused_and_can_come_again(layer):
    good, experts = Experts(SIZES), Experts(SIZES)
    experts.scales["w2"][1:3, 0, 0] = 255
    with pytest.raises(ValueError, match="expert 1: w2 scale of row 0, group 0"):
        load_split(layer, experts)
    with pytest.raises(ValueError, match="expert 2: w2 scale of row 0, group 0"):
        finish(layer)
    for expert in (1, 2):
        for suffix, kind in (("weight_packed", "codes"), ("weight_scale", "scales")):
            load_one(layer, f"w2_{suffix}", good.tensor(kind, "w2", expert, "w2"), "w2", expert)
    finish(layer)
    check_layer(layer, good)


def test_what_never_came_is_missed_after_what_is_wrong(layer):
    experts = Experts(SIZES)
    experts.scales["w13"][0, 0, 0] = 255
    load_split(layer, experts, skip=("3.w2.weight_scale",))  # so that the layer is never complete
    with pytest.raises(ValueError, match="expert 0: w1 scale of row 0, group 0"):
        finish(layer)
    with pytest.raises(ValueError, match=r"lacks 5 tensors.*expert 0 w1_weight_packed.*expert 3 w2_weight_scale"):
        finish(layer)


@pytest.mark.parametrize("is_deferred", [False, True])
def test_rounding_is_counted_over_the_layer(is_deferred):
    layer = deferred(CT_MXFP4, SIZES, additional=FP8)
    loader = layer.quant_method._loader
    loader.deferred = is_deferred
    experts = Experts(SIZES)
    for expert, row, byte in ((0, 3, 140), (2, 5, 139), (3, 9, 139)):
        experts.codes["w2"][expert, row] = 0x11  # 0.5 all over
        experts.scales["w2"][expert, row] = 127
        experts.scales["w2"][expert, row, 0] = byte
    load_split(layer, experts)
    loader.check_complete()
    rounding = loader.rounding
    # At 2^-13 below the top 0.5 becomes zero in four groups, at 2^-12 it becomes zero, too: a tie.
    assert rounding.groups == 3 * 4
    assert rounding.worst == 2.0**-12
    assert rounding.total == 4 * (320 * 3 + 96 * 5)


# How much the host does

VIEWS = {"view", "slice", "select", "detach", "expand", "unsqueeze", "alias", "as_strided", "lift_fresh", "narrow"}


class Dispatched(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("checkpoint", "additional", "small"), [(CT_MXFP4, None, 0), (CT_MXFP4, FP8, 0), (CT_NVFP4, None, 6)]
)
def test_the_host_does_little_for_an_expert(monkeypatch, checkpoint, additional, small):
    """Dispatched operators of one expert (three tensors of codes and of scales), views apart, on the path of a GPU.

    The device sees two copies and two operators of them; nothing reads a value back before the last expert.
    """
    fmt = NVFP4 if checkpoint is CT_NVFP4 else MXFP4
    sizes = Sizes(experts=4, hidden=128, intermediate=128)
    layer = deferred(checkpoint, sizes, additional=additional)
    experts = Experts(sizes, fmt=fmt)
    loader, scheme = layer.quant_method._loader, layer.quant_method.scheme
    loader._staging = Staging(CPU)
    monkeypatch.setattr(packing, "_compiled", lambda device: True)
    calls = [
        (f"{projection}_{suffix}", tensor, shard)
        for projection, shard in (("w13", "w1"), ("w2", "w2"), ("w13", "w3"))
        for suffix, kind in scheme.tensors
        if (tensor := experts.tensor(kind, projection, 0, shard, reciprocal=True)) is not None
    ]
    counts = []
    for expert in range(2):
        with Dispatched() as dispatched:
            for name, tensor, shard in calls:
                load_one(layer, name, tensor, shard, expert)
        counts.append({name: count for name, count in dispatched.counts.items() if name not in VIEWS})
    counts = counts[1]  # the first one makes the staging buffer
    assert counts["pack_rows"] == 2
    assert counts["empty"] == 2
    # To the device, once a projection; into the slots a projection's global scales, and what is no operator: the bytes.
    assert counts["copy_"] == (4 if fmt is NVFP4 else 2)
    waits = {"_local_scalar_dense", "is_nonzero", "nonzero", "equal", "item", "_to_copy"}
    assert not waits & set(counts), counts
    assert sum(counts.values()) - counts["copy_"] - 4 <= small, counts  # those of a global scale


# Staging


@pytest.mark.parametrize("slot", [80, 100, 1000, 4096])
def test_staged_tensors_arrive_joined_whatever_the_slots_hold(slot):
    gen = torch.Generator().manual_seed(0)

    def byte(*shape):
        return torch.randint(0, 256, shape, generator=gen, dtype=torch.uint8)

    stage = Staging(CPU, slot)
    for rows in (3, 17, 8):
        codes, scales = [byte(rows, 40)[:, 4:28], byte(5, 24)], [byte(rows, 3), byte(5, 3)]  # the first is a slice
        bias, factor = [torch.randn(rows + 5, generator=gen)], [torch.tensor(0.25).expand(rows)]
        groups = [codes, scales, bias, factor]
        found = stage.bring(groups)
        for joined, group in zip(found, groups, strict=True):
            assert joined.dtype == group[0].dtype
            assert joined.is_contiguous()
            assert joined.data_ptr() % 16 == stage._landing.data_ptr() % 16
            assert torch.equal(joined, torch.cat(group))


@pytest.mark.parametrize("threads", [1, 3])
def test_large_tensors_are_shared_out_to_threads(monkeypatch, threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(staging, "_SHARE", 1 << 10)
    stage, used = Staging(CPU, 1 << 16), set()
    copyto = staging.np.copyto

    def watched(*args):
        used.add(threading.current_thread() is threading.main_thread())
        copyto(*args)

    monkeypatch.setattr(staging.np, "copyto", watched)
    codes = torch.randint(0, 256, (1001, 200), dtype=torch.uint8)[:, 8:136]  # two slots and a bit, a slice of K
    for _ in range(2):
        (found,) = stage.bring([[codes]])
        assert torch.equal(found, codes)
    assert used == {threads == 1}
    assert stage._copies == []


def test_an_error_in_a_copying_thread_is_raised(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(staging, "_SHARE", 1)
    stage = Staging(CPU, 1 << 10)

    def fails(*args):
        raise MemoryError("no page")

    monkeypatch.setattr(staging.np, "copyto", fails)
    with pytest.raises(MemoryError, match="no page"):
        stage.bring([[torch.zeros((4, 16), dtype=torch.uint8)]])


@pytest.mark.parametrize("fault", ["a copy", "a thread"])
def test_no_thread_copies_on_after_an_error(monkeypatch, fault):
    """The next call fills the same slots, and what was to be copied may be gone by then."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(staging, "_SHARE", 1)
    stage, copyto = Staging(CPU, 1 << 10), staging.np.copyto
    old, new = (torch.full((4, 16), value, dtype=torch.uint8) for value in (1, 2))
    begun, ended = threading.Event(), []

    def slow(part, source):
        if fault == "a copy" and source.ctypes.data == old.data_ptr():
            assert begun.wait(10)
            raise MemoryError("no page")
        begun.set()
        time.sleep(0.2)
        copyto(part, source)
        ended.append(source)

    submit = stage._pool.submit

    def submit_once(*args):
        if fault == "a thread" and stage._copies:
            assert begun.wait(10)
            raise RuntimeError("can't start new thread")
        return submit(*args)

    monkeypatch.setattr(staging.np, "copyto", slow)
    monkeypatch.setattr(stage._pool, "submit", submit_once)
    with pytest.raises((MemoryError, RuntimeError), match="no page|can't start"):
        stage.bring([[old]])
    assert len(ended) == 1
    monkeypatch.setattr(staging.np, "copyto", copyto)
    assert torch.equal(stage.bring([[new]])[0], new)


def test_without_pinned_memory_there_is_a_warning(monkeypatch):
    empty, warned = torch.empty, []

    def refuses(*args, pin_memory=False, **kwargs):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", refuses)
    monkeypatch.setattr(staging.logger, "warning", lambda message, *args: warned.append(message % args))
    slots = staging._two_slots(16 << 20, pinned=True)
    assert [slot.nbytes for slot in slots] == [16 << 20] * 2
    (message,) = warned
    assert message.startswith("no 32 MiB of pinned host memory (CUDA error: out of memory)")


def test_what_has_no_bytes_is_brought_too():
    stage = Staging(CPU, 64)
    byte = torch.arange(40, dtype=torch.uint8).view(2, 20)
    found = stage.bring([[torch.empty(0, 5)], [torch.empty(3, 0), torch.empty(2, 0)], [byte], [byte[:0], byte[1:]]])
    assert [tuple(tensor.shape) for tensor in found] == [(0, 5), (5, 0), (2, 20), (1, 20)]
    assert torch.equal(found[2], byte)
    assert torch.equal(found[3], byte[1:])


@pytest.mark.parametrize("seed", [0, 1])
def test_layers_may_come_interleaved(monkeypatch, seed):
    """Tensors of two layers in any order, some twice, through slots smaller than a projection."""
    monkeypatch.setattr(staging, "_STAGINGS", WeakValueDictionary())
    monkeypatch.setattr(staging, "_SHARE", 1 << 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    layers = [deferred(CT_MXFP4, SIZES, name=f"model.layers.{i}.mlp.experts") for i in range(2)]
    experts = [Experts(SIZES, seed=i) for i in range(2)]
    stage = staging._STAGINGS[CPU] = Staging(CPU, 1 << 10)
    calls = [
        (layer, f"{projection}_{suffix}", weights.tensor(kind, projection, expert, shard), shard, expert)
        for layer, weights in zip(layers, experts, strict=True)
        for projection, shard in (("w13", "w1"), ("w13", "w3"), ("w2", "w2"))
        for suffix, kind in (("weight_packed", "codes"), ("weight_scale", "scales"))
        for expert in range(SIZES.experts)
    ]
    random.Random(seed).shuffle(calls)
    for call in calls + calls[:20]:
        load_one(*call)
    assert all(layer.quant_method._loader._staging is stage for layer in layers)
    for layer, weights in zip(layers, experts, strict=True):
        finish(layer)
        check_layer(layer, weights)


def test_slots_and_what_lands_are_bounded():
    stage = Staging(CPU, 1 << 10)
    assert sum(slot.nbytes for slot in stage._slots) == 2 << 10
    stage.bring([[torch.zeros(100, 100)]])
    landing = stage._landing
    assert 40_000 <= landing.nbytes < 40_016
    stage.bring([[torch.zeros(10, 100)]])
    assert stage._landing is landing
    with pytest.raises(ValueError, match="a row of 4000 bytes is larger than a staging slot of 1024"):
        stage.bring([[torch.zeros(2, 1000)]])


def test_a_slot_is_written_again_only_after_the_gpu_took_it(monkeypatch):
    log = []

    class Event:
        def __init__(self, name):
            self.name = name

        def record(self, stream):
            log.append(f"{self.name} recorded on {stream}")

        def synchronize(self):
            log.append(f"wait for {self.name}")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "main")
    stage = Staging(CPU, 64)
    stage._taken = [Event("first"), Event("second")]
    stage.bring([[torch.zeros(16)], [torch.zeros(16)]])  # 64 bytes each
    stage.bring([[torch.zeros(4)]])
    want = [f"{what} {slot}" for slot in ("first", "second", "first") for what in ("wait for", "recorded")]
    assert [entry.split(" recorded")[0] if "recorded" not in entry else entry for entry in log] == [
        f"wait for {entry.split()[-1]}" if entry.startswith("wait") else f"{entry.split()[-1]} recorded on main"
        for entry in want
    ]


def test_layers_share_the_staging_until_the_last_one_is_loaded(monkeypatch):
    monkeypatch.setattr(staging, "_STAGINGS", WeakValueDictionary())  # other tests' layers may not be gone yet
    layers = [deferred(CT_MXFP4, SIZES, name=f"model.layers.{i}.mlp.experts") for i in range(2)]
    for layer in layers:
        load_split(layer, Experts(SIZES))
    # numbers alone: a failing assertion's parts would be kept
    used = [id(layer.quant_method._loader._staging) for layer in layers]
    assert used == [id(staging_of(CPU))] * 2
    finish(layers[0])
    assert CPU in staging._STAGINGS
    finish(layers[1])
    assert CPU not in staging._STAGINGS
