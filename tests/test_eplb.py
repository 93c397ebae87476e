# SPDX-License-Identifier: Apache-2.0
"""Expert load balancing: redundant experts are loaded, and vLLM's in-place moves keep every output."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from eplb import (
    AFTER,
    BEFORE,
    CASES,
    REDUNDANT,
    SIZES,
    build_case,
    experts_of,
    load_by_mapping,
    physical_ids,
    rearrange,
)
from layers import apply, engine, finish, load_one, relative_error, routing
from test_method import oracle


def under(case):
    return engine(additional={"humming": CASES[case][2]}, eplb=True)


def ready(case, redundant=REDUNDANT):
    layer = build_case(case, redundant)
    load_by_mapping(layer, experts_of(case))
    finish(layer)
    return layer


@pytest.mark.parametrize("case", CASES)
def test_moved_experts_give_the_same_bits(case):
    with under(case):
        layer = ready(case)
        assert layer.moe_config.moe_parallel_config.enable_eplb
        assert layer.quant_method.supports_eplb
        x, weights, ids = routing(33, SIZES)
        ids[3, 1] = -1
        first = apply(layer, x, weights, physical_ids(ids, BEFORE))
        assert relative_error(first, oracle(layer, experts_of(case), x, weights, ids)) < 4e-3
        pointers = [parameter.data_ptr() for parameter in layer.parameters()]
        rearrange(layer, BEFORE, AFTER)
        for copy in range(3):
            assert torch.equal(apply(layer, x, weights, physical_ids(ids, AFTER, copy)), first)
        # The experts did move: the old ids are wrong now.
        assert relative_error(apply(layer, x, weights, physical_ids(ids, BEFORE)), first) > 0.5
        assert [parameter.data_ptr() for parameter in layer.parameters()] == pointers


@pytest.mark.parametrize("case", ["mxfp4-bias", "nvfp4", "w4a8"])
def test_every_parameter_is_moved(case):
    """What vLLM moves is all that apply() reads: one contiguous row an expert, nothing else."""
    with under(case):
        layer = ready(case)
        moved = list(layer.get_expert_weights())
        assert {t.data_ptr() for t in moved} == {p.data_ptr() for p in layer.parameters()}
        assert sum(t.nbytes for t in moved) == sum(p.nbytes for p in layer.parameters())
        assert all(t.shape[0] == len(BEFORE) for t in moved)
        assert not any(buffer.is_floating_point() for _, buffer in layer.named_buffers())


@pytest.mark.parametrize("stop_at_success", [False, True])
@pytest.mark.parametrize("case", ["mxfp4-bias", "nvfp4", "w4a8-relu2"])
def test_copies_equal_their_expert(case, stop_at_success):
    with under(case):
        layer = build_case(case)
        load_by_mapping(layer, experts_of(case), stop_at_success=stop_at_success)
        finish(layer)
        plain = ready(case, redundant=0)
    for name, parameter in layer.named_parameters():
        for slot, expert in enumerate(BEFORE):
            assert torch.equal(parameter[slot], getattr(plain, name)[expert]), (name, slot)


def test_fused_global_scales_reach_the_copies():
    """vLLM hands over the global scales of all logical experts as if they were one expert's."""
    case, experts = "nvfp4", experts_of("nvfp4")
    with under(case):
        layer = build_case(case)
        skipped = [f"{e}.{name}_proj.weight_global_scale" for e in range(4) for name in ("gate", "up", "down")]
        load_by_mapping(layer, experts, skip=tuple(skipped))
        for shard, projection in (("w1", "w13"), ("w3", "w13"), ("w2", "w2")):
            stacked = experts.globals[projection].reciprocal()
            load_one(layer, f"{projection}_weight_global_scale", stacked, shard, 0)
        finish(layer)
        plain = ready(case)
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, getattr(layer, name)), name


def test_a_missing_tensor_is_missed_in_every_copy():
    with under("mxfp4"):
        layer = build_case("mxfp4")
        load_by_mapping(layer, experts_of("mxfp4"), skip=("1.down_proj.weight_scale",))
        with pytest.raises(ValueError, match=r"lacks 2 tensors .*expert 1 w2_weight_scale, expert 5 w2_weight_scale"):
            finish(layer)


def test_rounding_of_copies_counts_each():
    with under("w4a8"):
        one, more = build_case("w4a8", 0), build_case("w4a8")
        for layer in (one, more):
            load_by_mapping(layer, experts_of("w4a8"))
        groups = [layer.quant_method._loader.rounding.total for layer in (one, more)]
    assert groups[1] * SIZES.experts == groups[0] * len(BEFORE)


@pytest.mark.parametrize("case", ["mxfp4-bias", "nvfp4", "w4a8"])
def test_two_ranks_exchange_experts(case):
    """Each rank is a process; vLLM sends experts between them over gloo."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = str(Path(__file__).with_name("eplb.py"))
    root = str(Path(__file__).parent.parent)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}"}
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), "2", str(port), case],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        logs = [rank.communicate(timeout=180)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for number, (rank, log) in enumerate(zip(ranks, logs, strict=True)):
        assert rank.returncode == 0, log[-4000:]
        assert f"rank {number} of 2 agrees" in log


def test_elastic_expert_parallelism_is_refused_by_layer():
    with engine() as config:
        config.parallel_config.enable_elastic_ep = True
        with pytest.raises(
            NotImplementedError, match=r"mlp\.experts: .*elastic expert parallelism.*--enable-eplb runs"
        ):
            build_case("mxfp4", 0)
