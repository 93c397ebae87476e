# SPDX-License-Identifier: Apache-2.0
"""evals/activation_modes.py: its W4A8 and BF16 are the reference path's, its quantisers and rounded weights by hand."""

import json

import pytest
import torch

from evals import activation_modes as modes
from evals import weights
from evals.tinymath.data import evaluation, prompt
from vllm_humming.moe import reference
from vllm_humming.moe.packing import allocate, pack_expert
from vllm_humming.moe.quantize import dequantize_mxfp4, quantize_mxfp4
from vllm_humming.moe.reference import Activation, oracle_moe
from vllm_humming.moe.weight_formats import MXFP4, MXFP4_FP8

SMALL = ["--tokens", "9", "--hidden", "320", "--intermediate", "160", "--experts", "3"]
BF16, W4A8 = modes.MODES[0].name, modes.MODES[1].name


def reference_error(layer, weight_format):
    """The relative error of the op's own path, through packed weights."""
    packed, exact = [], []
    for dense, gated in ((layer.w13, True), (layer.w2, False)):
        experts, n, k = dense.shape
        p = allocate(experts, n, k, gated=gated, has_bias=False, device="cpu", weight_format=weight_format)
        found = [quantize_mxfp4(w) for w in dense]
        for e, (codes, scales) in enumerate(found):
            pack_expert(p, e, codes, scales, None, gated=gated, dtype=torch.bfloat16, layer="l")
        packed.append(p)
        exact.append([dequantize_mxfp4(*pair, torch.float64) for pair in found])
    out = torch.empty_like(layer.x)
    routing = layer.topk_weights, layer.topk_ids, None
    reference.moe(layer.x, *routing, *packed, out, activation=Activation.SWIGLU)
    want = oracle_moe(layer.x, *routing, exact[0], None, exact[1], None, activation=Activation.SWIGLU)
    return float((out.double() - want).norm() / want.norm())


@pytest.mark.parametrize("name", ["normal", "outliers"])
def test_command_measures_what_the_reference_path_does(name, tmp_path, capsys):
    out = tmp_path / "modes.json"
    modes.main(["--inputs", name, *SMALL, "--out", str(out)])
    records = {record["mode"]: record for record in json.loads(out.read_text())["results"]}
    assert list(records) == [mode.name for mode in modes.MODES]
    printed = capsys.readouterr().out
    assert all(mode in printed for mode in records)
    (layer,) = modes.layers(modes.arguments(SMALL), name)
    # Equal here; the reference pads, so another BLAS may turn a few last bits of BF16.
    assert records[W4A8]["plain"] == pytest.approx(reference_error(layer, MXFP4_FP8), rel=1e-3)
    assert records[BF16]["plain"] == pytest.approx(reference_error(layer, MXFP4), rel=1e-3)
    for mode, record in records.items():
        rounded = "in e4m3" in mode
        assert (record["changed"] > 0.1) == rounded
        assert (record["kept"] > 4e-3) == rounded  # W4A8's bound for the arithmetic alone
        assert max(record["plain"], record["token"]) < record["worst"] < 0.3
        assert record["token"] == pytest.approx(record["plain"], rel=0.6)  # tokens of like size
    by_two, best = (record["by"] for mode, record in records.items() if "in e4m3" in mode)
    assert 0 < best < by_two < 0.0625  # half a step of e4m3


def test_quantisers():
    x = torch.zeros(2, 64)
    x[0, :3] = torch.tensor([500.0, -1.0, 448.0])
    x[0, 32:34] = torch.tensor([448.0, 2.0**-9])
    up, ocp, token = modes.mxfp8_up(x), modes.mxfp8_ocp(x), modes.fp8_token(x)
    assert up.scales[0].tolist() == [2.0, 1.0]
    assert up.dequantised()[0, :3].tolist() == [512.0, -1.0, 448.0]  # 250 lies between 240 and 256
    assert up.dequantised()[0, 32:34].tolist() == [448.0, 2.0**-9]
    assert ocp.scales[0].tolist() == [1.0, 1.0]
    assert ocp.dequantised()[0, :3].tolist() == [448.0, -1.0, 448.0]  # 500 is cut
    assert token.scales.shape == (2, 1)
    assert token.values[0, 0] == 448
    assert all(torch.equal(found.dequantised()[1], torch.zeros(64).double()) for found in (up, ocp, token))


def test_nvfp4_as_e4m3():
    one = torch.ones(1)
    # e2m1 * e4m3: six significant bits, 2.8125, of which e4m3 has four; 27/8 lies between 13/4 and 7/2
    values = torch.tensor([[448.0, 1.5 * 1.875, 3 * 1.125, 3 * 1.25, 0.5 * 1.875]])
    rounded = modes._as_e4m3(modes.Weight(values, one, values.double()), [1.0])
    assert rounded.factor.tolist() == [1.0]
    assert rounded.values.tolist() == [[448.0, 2.75, 3.5, 3.75, 0.9375]]
    assert rounded.change().tolist() == [[0.0, -0.0625, 0.125, 0.0, 0.0]]
    # Under 1.5 all of these fit.
    values = torch.tensor([[6 * 1.875, 3 * 1.125, 1.5 * 1.625]])
    best = modes._as_e4m3(modes.Weight(values, one, values.double()), [1.0, 1.25, 1.5])
    assert best.factor.tolist() == [1.5 * 2.0**-5]
    assert not best.change().any()
    zeros = torch.zeros(1, 3)
    assert not modes._as_e4m3(modes.Weight(zeros, one, zeros.double()), [1.0]).change().any()


def test_tinymath_layers_are_the_models_own(tmp_path):
    """What the modes are measured on gives what the model's layers give."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    weights.convert(modes.MODEL, tmp_path, "bf16")
    network = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    outputs = []
    for block in network.model.layers:
        block.mlp.register_forward_hook(lambda _, given, out: outputs.append(out))
    problem = evaluation("test")[0]
    ids = AutoTokenizer.from_pretrained(tmp_path)(f"{prompt(problem.question)} {problem.answer}", return_tensors="pt")
    with torch.no_grad():
        network(ids.input_ids, use_cache=False)
    layers = modes.tinymath_layers(modes.MODEL, 1)
    assert len(layers) == len(outputs) == 6
    for layer, out in zip(layers, outputs, strict=True):
        w13, w2 = ([modes.mxfp4(w) for w in part] for part in (layer.w13, layer.w2))
        assert all(torch.equal(w.exact, dense.double()) for w, dense in zip(w2, layer.w2, strict=True))
        found = modes.run(layer, modes.MODES[0], w13, w2).double()
        want = (out[0] if isinstance(out, tuple) else out).flatten(0, -2).double()
        # a token whose routing is a near tie may go elsewhere
        error = (found - want).norm(dim=1) / want.norm(dim=1)
        assert float(error.median()) < 1e-2
