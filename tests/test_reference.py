# SPDX-License-Identifier: Apache-2.0
"""The reference layer through its op, against the float64 oracle, and the oracle against a loop over slots."""

import math
from typing import NamedTuple

import pytest
import torch
from plain_gemm import plain_gemm

import vllm_humming.ops  # noqa: F401  (defines the ops)
from vllm_humming.moe import reference
from vllm_humming.moe.packing import PackedProjection, allocate, pack_expert
from vllm_humming.moe.quantize import dequantize_mxfp4, quantize_mxfp4
from vllm_humming.moe.reference import Activation, oracle_moe
from vllm_humming.moe.weight_formats import MXFP4

TOLERANCE = 4e-3  # relative Frobenius error of a bf16 layer
SILU = {"activation": Activation.SWIGLU}
ACTIVATIONS = {
    "silu": SILU,
    "silu_limit": {"activation": Activation.SWIGLU, "limit": 0.5},
    "swigluoai": {"activation": Activation.SWIGLU, "alpha": 1.702, "beta": 1.0, "limit": 7.0},
    "gelu_tanh": {"activation": Activation.GELU_TANH},
    "relu2": {"activation": Activation.RELU2},
}


class Layer(NamedTuple):
    w13: PackedProjection
    w2: PackedProjection
    dense: tuple  # w13, b13, w2, b2 as lists of float tensors, gate and up one after the other


def make_layer(
    experts, hidden, intermediate, *, gated=True, bias=False, gate_up="packed", dtype=torch.bfloat16, seed=0, gain=1.0,
    weight_format=MXFP4, span=0,
):  # fmt: skip
    gen = torch.Generator().manual_seed(seed)
    rows = intermediate * (2 if gated else 1)
    make = {"has_bias": bias, "device": "cpu", "weight_format": weight_format}
    w13 = allocate(experts, rows, hidden, gated=gated, pad_rows_to=128, **make)
    w2 = allocate(experts, hidden, intermediate, gated=False, **make)
    dense = ([], [], [], [])
    for e in range(experts):
        for i, (p, n, k, is_gated) in enumerate([(w13, rows, hidden, gated), (w2, hidden, intermediate, False)]):
            codes, scales = quantize_mxfp4(torch.randn(n, k, generator=gen) * (2.0 * gain / k**0.5))
            if span:
                below = torch.randint(0, span + 1, scales.shape, generator=gen, dtype=torch.uint8)
                scales -= below * (torch.rand(scales.shape, generator=gen) < 0.25)
            b = torch.randn(n, generator=gen) if bias else None
            order = gate_up if is_gated else "packed"
            pack_expert(p, e, codes, scales, b, gated=is_gated, gate_up=order, dtype=dtype, layer="l")
            w = dequantize_mxfp4(codes, scales, torch.float32)
            if order == "interleaved":
                w = torch.cat([w[0::2], w[1::2]])
                b = None if b is None else torch.cat([b[0::2], b[1::2]])
            dense[2 * i].append(w)
            dense[2 * i + 1].append(b)
    return Layer(w13, w2, (dense[0], dense[1] if bias else None, dense[2], dense[3] if bias else None))


def make_inputs(tokens, hidden, experts, top_k, *, dtype=torch.bfloat16, seed=0):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=gen).to(dtype)
    weights, ids = torch.randn(tokens, experts, generator=gen).softmax(-1).topk(top_k, -1)
    return x, weights.contiguous(), ids.int().contiguous()


def run(layer, x, weights, ids, expert_map=None, *, router_weight_on_input=False, **kw):
    args = {"activation": 0, "alpha": 1.0, "beta": 0.0, "limit": math.inf} | kw
    out = torch.full_like(x, math.nan)
    torch.ops.vllm_humming.moe(
        x,
        weights,
        ids,
        expert_map,
        *layer.w13.tensors,
        *layer.w2.tensors,
        torch.empty(0, dtype=torch.uint8),
        out,
        layer.w13.weight_format.code,
        int(args["activation"]),
        args["alpha"],
        args["beta"],
        args["limit"],
        router_weight_on_input,
        0,
        0,
    )
    return out


def error(out, want):
    return float((out.double() - want).norm() / want.norm())


def slot_by_slot(x, weights, ids, dense, act, alpha=1.0, beta=0.0, limit=math.inf):
    """The layer written out for one slot at a time, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    w13, b13, w2, b2 = dense
    for t in range(x.shape[0]):
        for k in range(ids.shape[1]):
            e = int(ids[t, k])
            if e < 0:
                continue
            h = w13[e].double() @ x[t].double() + (0 if b13 is None else b13[e].double())
            if act is Activation.RELU2:
                a = h.clamp(min=0) ** 2
            else:
                gate, up = h[: len(h) // 2], h[len(h) // 2 :]
                if act is Activation.GELU_TANH:
                    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
                    a = 0.5 * gate * (1 + inner.tanh()) * up
                else:
                    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
                    a = (up + beta) * gate / (1 + (-alpha * gate).exp())
            out[t] += float(weights[t, k]) * (w2[e].double() @ a + (0 if b2 is None else b2[e].double()))
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_and_biases(name, bias, dtype):
    kw = ACTIVATIONS[name]
    act = kw["activation"]
    layer = make_layer(5, 160, 96, gated=act.gated, bias=bias, dtype=dtype)
    x, weights, ids = make_inputs(17, 160, 5, 3, dtype=dtype)
    ids[4, 1] = -1
    want = oracle_moe(x, weights, ids, None, *layer.dense, **kw)
    by_slot = slot_by_slot(x, weights, ids, layer.dense, act, **{k: v for k, v in kw.items() if k != "activation"})
    assert error(want, by_slot) < 1e-12
    assert error(run(layer, x, weights, ids, **kw), want) < TOLERANCE / (1 if dtype == torch.bfloat16 else 6)


def test_limits_apply_to_large_gates():
    layer = make_layer(4, 128, 128)
    x, weights, ids = make_inputs(8, 128, 4, 2)
    x *= 20  # pushes most gates past the limit of 7
    for kw in (ACTIVATIONS["swigluoai"], ACTIVATIONS["silu_limit"]):
        want = oracle_moe(x, weights, ids, None, *layer.dense, **kw)
        assert error(run(layer, x, weights, ids, **kw), want) < TOLERANCE
        assert error(want, oracle_moe(x, weights, ids, None, *layer.dense, activation=0)) > 0.1


def test_interleaved_rows_equal_packed_rows():
    layer = make_layer(4, 96, 160, bias=True, gate_up="interleaved")
    x, weights, ids = make_inputs(9, 96, 4, 2)
    kw = ACTIVATIONS["swigluoai"]
    assert error(run(layer, x, weights, ids, **kw), oracle_moe(x, weights, ids, None, *layer.dense, **kw)) < TOLERANCE


@pytest.mark.parametrize(("hidden", "intermediate"), [(736, 96), (2880, 360), (1856, 736)])
def test_sizes_that_fill_no_tile(hidden, intermediate):
    intermediate = intermediate // 32 * 32
    layer = make_layer(2, hidden, intermediate)
    x, weights, ids = make_inputs(3, hidden, 2, 2)
    assert error(run(layer, x, weights, ids), oracle_moe(x, weights, ids, None, *layer.dense, **SILU)) < TOLERANCE


def test_no_tokens():
    layer = make_layer(4, 96, 96)
    x, weights, ids = make_inputs(0, 96, 4, 2)
    assert run(layer, x, weights, ids).shape == (0, 96)
    assert oracle_moe(x, weights, ids, None, *layer.dense, **SILU).shape == (0, 96)


@pytest.mark.parametrize("tokens", [1, 16, 300])
def test_all_ids_minus_one_give_zero(tokens):
    layer = make_layer(4, 96, 96, bias=True)
    x, weights, ids = make_inputs(tokens, 96, 4, 2)
    x[:], weights[:] = math.nan, math.nan
    out = run(layer, x, weights, ids.fill_(-1))
    assert torch.equal(out, torch.zeros_like(out))
    out = run(layer, x, weights, ids.fill_(-1), torch.tensor([0, 1, 2, 3], dtype=torch.int32))
    assert torch.equal(out, torch.zeros_like(out))


def test_padded_tokens_are_zero_and_disturb_nobody():
    layer = make_layer(4, 96, 96)
    x, weights, ids = make_inputs(16, 96, 4, 2)
    want = run(layer, x[:8].contiguous(), weights[:8], ids[:8])
    ids[8:] = -1
    x[8:] = math.nan
    out = run(layer, x, weights, ids)
    assert torch.equal(out[:8], want)
    assert torch.equal(out[8:], torch.zeros_like(out[8:]))


def test_ids_out_of_range_contribute_nothing():
    layer = make_layer(4, 96, 96)
    x, weights, ids = make_inputs(8, 96, 4, 2)
    far, none = ids.clone(), ids.clone()
    far[3, 1], none[3, 1] = 4, -1
    far[5, 0], none[5, 0] = 2**31 - 1, -1
    assert torch.equal(run(layer, x, weights, far), run(layer, x, weights, none))


def test_duplicated_ids_count_twice():
    layer = make_layer(4, 96, 96)
    x, weights, ids = make_inputs(6, 96, 4, 2)
    ids[:] = 2
    want = oracle_moe(x, weights.sum(1, keepdim=True), ids[:, :1], None, *layer.dense, **SILU)
    assert error(run(layer, x, weights, ids), want) < TOLERANCE


@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_expert_map(activation):
    kw = ACTIVATIONS[activation]
    layer = make_layer(3, 96, 96, gated=kw["activation"].gated)
    x, weights, ids = make_inputs(12, 96, 8, 4)
    expert_map = torch.tensor([-1, 2, -1, 0, -1, 1, -1, -1], dtype=torch.int32)
    ids[2, 2] = -1
    local = torch.where(ids >= 0, expert_map[ids.clamp(min=0).long()], -1).int()
    out = run(layer, x, weights, ids, expert_map, **kw)
    assert torch.equal(out, run(layer, x, weights, local, **kw))
    assert error(out, oracle_moe(x, weights, ids, expert_map, *layer.dense, **kw)) < TOLERANCE


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("bias", [False, True])
def test_router_weight_on_input(top_k, bias):
    layer = make_layer(4, 96, 96, bias=bias)
    x, weights, ids = make_inputs(10, 96, 4, top_k)
    weights *= 1.5
    out = run(layer, x, weights, ids, router_weight_on_input=True)
    assert error(out, oracle_moe(x, weights, ids, None, *layer.dense, router_weight_on_input=True, **SILU)) < TOLERANCE
    # the definition: each slot is the unweighted layer of the scaled token
    want = torch.zeros(x.shape, dtype=torch.float64)
    for k in range(top_k):
        one = torch.ones(10, 1)
        want += oracle_moe(x.double() * weights[:, k : k + 1], one, ids[:, k : k + 1], None, *layer.dense, **SILU)
    assert error(out, want) < TOLERANCE


def test_inputs_are_only_read_and_runs_repeat_bitwise():
    layer = make_layer(4, 96, 96, bias=True)
    x, weights, ids = make_inputs(33, 96, 4, 2)
    expert_map = torch.arange(4, dtype=torch.int32)
    tensors = [x, weights, ids, expert_map, *layer.w13.tensors, *layer.w2.tensors]
    before = [t.clone() for t in tensors]
    first = run(layer, x, weights, ids, expert_map)
    assert torch.equal(first, run(layer, x, weights, ids, expert_map))
    assert all(torch.equal(t, old) for t, old in zip(tensors, before, strict=True))


def test_a_token_alone_equals_the_token_in_a_batch():
    layer = make_layer(4, 96, 96)
    x, weights, ids = make_inputs(20, 96, 4, 2)
    batch = run(layer, x, weights, ids)
    for t in (0, 7, 19):
        alone = run(layer, x[t : t + 1], weights[t : t + 1], ids[t : t + 1])
        torch.testing.assert_close(alone, batch[t : t + 1], rtol=2e-2, atol=2e-3)


def test_work_grows_with_experts_not_tokens(monkeypatch):
    layer = make_layer(4, 96, 96)
    calls = []
    unpack = reference.unpack_unscaled
    monkeypatch.setattr(reference, "unpack_unscaled", lambda *a, **k: calls.append(1) or unpack(*a, **k))
    x, weights, ids = make_inputs(500, 96, 4, 2)
    run(layer, x, weights, ids.clamp(max=1))
    assert len(calls) == 2 * 2


def test_large_scales_pass_through_the_row_scale():
    """Scales above 2^1 are split between group and row; the layer must see their product."""
    p = allocate(1, 64, 128, gated=False, has_bias=False, device="cpu")
    codes = torch.full((64, 64), 0x22, dtype=torch.uint8)
    scales = torch.full((64, 4), 127 + 20, dtype=torch.uint8)
    pack_expert(p, 0, codes, scales, None, gated=False, dtype=torch.float16, layer="l")
    assert float(p.row_scale[0, 0]) == 2.0**19
    x = torch.full((2, 128), 2.0**-12, dtype=torch.float16)
    out = torch.empty(2, 64, dtype=torch.float16)
    plain_gemm(x, p, out)
    assert torch.equal(out, torch.full_like(out, 128 * 2.0**8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_identity_activations_return_the_weights(dtype):
    gen = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (96, 80), generator=gen, dtype=torch.uint8)
    scales = torch.randint(106, 135, (96, 1), generator=gen, dtype=torch.uint8).expand(96, 5).contiguous()
    p = allocate(1, 96, 160, gated=False, has_bias=True, device="cpu")
    bias = torch.zeros(96)
    pack_expert(p, 0, codes, scales, bias, gated=False, dtype=dtype, layer="l")
    out = torch.empty(160, 96, dtype=dtype)
    plain_gemm(torch.eye(160, dtype=dtype), p, out)
    assert torch.equal(out.T, dequantize_mxfp4(codes, scales, dtype))
