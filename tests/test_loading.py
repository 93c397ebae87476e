# SPDX-License-Identifier: Apache-2.0
"""What the weight loader accepts, what it refuses, and what ends up in the packed parameters."""

import contextlib
import itertools
from types import SimpleNamespace

import pytest
import torch
from layers import (
    CT_MXFP4,
    CT_NVFP4,
    DEEPSEEK,
    GPT_OSS,
    MODELOPT,
    MODELOPT_MIXED,
    MODELOPT_OLD,
    QUARK,
    Experts,
    Sizes,
    build,
    engine,
    finish,
    load_one,
    load_split,
    load_stacked,
    quant_config,
)

from vllm_humming.moe import packing
from vllm_humming.moe.quantize import dequantize_mxfp4, dequantize_nvfp4, quantize_mxfp4, quantize_nvfp4
from vllm_humming.moe.weight_formats import MXFP4, NVFP4
from vllm_humming.quant_methods import loading
from vllm_humming.quant_methods.loading import ExpertLoader, ExpertShape
from vllm_humming.quant_methods.schemes import CT_NVFP4 as CT_NVFP4_SCHEME
from vllm_humming.quant_methods.schemes import MODELOPT_NVFP4, ONLINE, PLAIN_MXFP4

SIZES = Sizes()
NAME = "model.layers.0.mlp.experts"
GPT_OSS_LAYER = {"has_bias": True, "activation": "swigluoai"}
NVFP4_SIZES = Sizes(hidden=80, intermediate=208)  # 5 and 13 scale groups
FORMATS = {
    "compressed-tensors NVFP4": (CT_NVFP4, NVFP4),
    "ModelOpt": (MODELOPT, NVFP4),
    "ModelOpt old": (MODELOPT_OLD, NVFP4),
    "ModelOpt mixed": (MODELOPT_MIXED, NVFP4),
    "Quark": (QUARK, MXFP4),
    "DeepSeek-V4": (DEEPSEEK, MXFP4),
}


@pytest.fixture
def layer():
    with engine():
        yield build(CT_MXFP4, SIZES)


@pytest.fixture
def nvfp4_layer():
    with engine():
        yield build(MODELOPT, NVFP4_SIZES)


def unpacked(tensors, expert, rows, k, gated):
    return packing.unpack_expert(
        tensors, expert, dtype=torch.bfloat16, k=k, out_features=rows, gated=gated, out_dtype=torch.float64
    )


def check_layer(layer, experts, *, interleaved=False):
    """Every expert's packed weights and biases equal the checkpoint's, bit for bit."""
    from vllm_humming.moe.experts import packed_of

    packed = packed_of(layer, layer.quant_method.weight_format)
    for projection in ("w13", "w2"):
        dense = experts.dense(projection)
        for e in range(dense.shape[0]):
            expected, bias = dense[e], experts.bias[projection][e] if experts.bias else None
            gated = projection == "w13" and layer.activation.is_gated
            if gated and interleaved:
                expected = torch.cat([expected[::2], expected[1::2]])
                bias = None if bias is None else torch.cat([bias[::2], bias[1::2]])
            weight, packed_bias = unpacked(packed[projection], e, *expected.shape, gated)
            assert torch.equal(weight.double(), expected)
            assert (bias is None) == (packed_bias is None)
            if bias is not None:
                assert torch.equal(packed_bias, bias.double())


def test_parameters_are_preallocated_and_placeholders_empty(layer):
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    packed = {name: shapes[name] for name in ("w13_packed", "w13_row_scale", "w2_packed", "w2_row_scale")}
    assert packed == {
        "w13_packed": (4, 8, 1, 4352),  # I 160 -> 256, gate and up
        "w13_row_scale": (4, 512),
        "w2_packed": (4, 2, 2, 4352),
        "w2_row_scale": (4, 128),
    }
    empty = {name for name, shape in shapes.items() if shape == (0,)}
    assert empty == {"w13_weight_packed", "w13_weight_scale", "w2_weight_packed", "w2_weight_scale"}
    addresses = {name: getattr(layer, name).data_ptr() for name in packed}
    load_split(layer, Experts(SIZES))
    finish(layer)
    assert {name: getattr(layer, name).data_ptr() for name in packed} == addresses
    assert {name for name, _ in layer.named_parameters()} == {*packed, "packed_for_bfloat16"}
    assert all(p.is_contiguous() and p.shape[0] == layer.local_num_experts for p in layer.parameters())


def test_split_experts(layer):
    experts = Experts(SIZES)
    load_split(layer, experts)
    finish(layer)
    check_layer(layer, experts)


def test_stacked_interleaved_experts_with_biases():
    with engine():
        layer = build(GPT_OSS, SIZES, **GPT_OSS_LAYER)
    experts = Experts(SIZES, bias=True)
    load_stacked(layer, experts)
    finish(layer)
    check_layer(layer, experts, interleaved=True)


def test_single_experts_of_a_gpt_oss_checkpoint():
    with engine():
        layer = build(GPT_OSS, SIZES, **GPT_OSS_LAYER)
    experts = Experts(SIZES, bias=True)
    for e in range(SIZES.experts):
        for projection in ("w13", "w2"):
            codes = experts.codes[projection][e]
            shard = f"gpt_oss_{projection}"
            load_one(layer, f"{projection}_weight", codes.view(codes.shape[0], -1, 16), shard, e)
            load_one(layer, f"{projection}_weight_scale", experts.scales[projection][e], shard, e)
            load_one(layer, f"{projection}_bias", experts.bias[projection][e], shard, e)
    finish(layer)
    check_layer(layer, experts, interleaved=True)


@pytest.mark.parametrize("codes", [torch.uint8, torch.int8])
@pytest.mark.parametrize("scales", [torch.uint8, torch.float8_e8m0fnu, torch.float32])
def test_dtypes_of_codes_and_scales(layer, codes, scales):
    experts = Experts(SIZES)
    given = Experts(SIZES)
    given.codes = {name: t.view(codes) for name, t in given.codes.items()}
    if scales == torch.float32:
        given.scales = {name: torch.exp2(t.float() - 127) for name, t in given.scales.items()}
    else:
        given.scales = {name: t.view(scales) for name, t in given.scales.items()}
    load_split(layer, given)
    finish(layer)
    check_layer(layer, experts)


def test_nothing_is_held_back(layer):
    """Staging holds one expert at most when a checkpoint comes expert by expert, and nothing after it."""
    loader, held = layer.quant_method._loader, []
    stage = loader._stage

    def watched(*args):
        stage(*args)
        held.append(len(loader._staged))

    loader._stage = watched
    load_split(layer, Experts(SIZES))
    assert max(held) <= 2  # w13 waits for up while w2 comes by
    assert held[-1] == 0
    finish(layer)
    assert layer.quant_method._loader is None


def allocation_peak(action):
    """The most bytes that were allocated at once, and those still allocated after, while action ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        action()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    total = list(itertools.accumulate(sizes))
    return max(total), total[-1]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("activation", ["silu", "relu2_no_mul"])
def test_every_format_loads(name, activation):
    """Packed weights equal scale times code times, for NVFP4, the global scale: each of gate, up and down its own."""
    checkpoint, fmt = FORMATS[name]
    sizes = NVFP4_SIZES if fmt is NVFP4 else SIZES
    with engine():
        layer = build(checkpoint, sizes, activation=activation)
    experts = Experts(sizes, gated=activation == "silu", fmt=fmt)
    load_split(layer, experts)
    finish(layer)
    check_layer(layer, experts)
    assert layer.w13_packed.shape[3] == fmt.chunk_bytes
    assert not [name for name, parameter in layer.named_parameters() if parameter.numel() == 0]


def test_experts_of_vllms_own_deepseek_v4_layer():
    """DeepSeek's tensor names, through vLLM's mapper and expert mapping, into the MoE layer that its model builds."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("this vLLM takes the model's CUDA implementation, which does not import here")
    from vllm.model_executor.layers.fused_moe import fused_moe_make_expert_params_mapping
    from vllm.models.deepseek_v4.cpu import model as deepseek

    sizes = Sizes(experts=4, hidden=128, intermediate=160)
    hf_config = SimpleNamespace(
        hidden_size=sizes.hidden,
        moe_intermediate_size=sizes.intermediate,
        n_routed_experts=sizes.experts,
        num_experts_per_tok=sizes.top_k,
        n_shared_experts=None,
        num_hash_layers=0,
        swiglu_limit=10.0,
        norm_topk_prob=True,
        topk_method="noaux_tc",
        hidden_act="silu",
    )
    model_config = SimpleNamespace(hf_config=hf_config)
    with engine():
        torch.set_default_dtype(torch.bfloat16)
        try:
            block = deepseek.DeepseekV4MoE(
                SimpleNamespace(model_config=model_config, quant_config=quant_config(DEEPSEEK)),
                prefix="model.layers.0.ffn",
            )
        finally:
            torch.set_default_dtype(torch.float32)
    layer, experts = block.experts.routed_experts, Experts(sizes)
    assert layer.quant_method.activation.limit == 10.0
    checkpoint = {}
    for e in range(sizes.experts):
        for shard, projection in (("w1", "w13"), ("w2", "w2"), ("w3", "w13")):
            name = f"layers.0.ffn.experts.{e}.{shard}"
            checkpoint[f"{name}.weight"] = experts.tensor("codes", projection, e, shard).view(torch.int8)
            checkpoint[f"{name}.scale"] = experts.tensor("scales", projection, e, shard).view(torch.float8_e8m0fnu)
    params = {f"model.layers.0.ffn.{name}": parameter for name, parameter in block.named_parameters()}
    mapping = fused_moe_make_expert_params_mapping(
        block,
        ckpt_gate_proj_name="w1",
        ckpt_down_proj_name="w2",
        ckpt_up_proj_name="w3",
        num_experts=sizes.experts,
    )
    for name, tensor in deepseek._make_deepseek_v4_weights_mapper("fp4").apply(checkpoint.items()):
        ((parameter, part, expert, shard),) = (entry for entry in mapping if entry[1] in name)
        mapped = name.replace(part, parameter)
        params[mapped].weight_loader(params[mapped], tensor, mapped, shard_id=shard, expert_id=expert)
    finish(layer)
    check_layer(layer, experts)


@pytest.mark.parametrize("bias", [False, True])
def test_formats_with_biases(bias):
    with engine():
        layer = build(MODELOPT, NVFP4_SIZES, has_bias=bias)
    experts = Experts(NVFP4_SIZES, fmt=NVFP4, bias=bias)
    load_split(layer, experts)
    finish(layer)
    check_layer(layer, experts)


@pytest.mark.parametrize("codes", [torch.uint8, torch.int8])
@pytest.mark.parametrize("scales", [torch.uint8, torch.float8_e4m3fn, torch.float32])
def test_dtypes_of_nvfp4_codes_and_scales(nvfp4_layer, codes, scales):
    experts, given = Experts(NVFP4_SIZES, fmt=NVFP4), Experts(NVFP4_SIZES, fmt=NVFP4)
    given.codes = {name: t.view(codes) for name, t in given.codes.items()}
    given.scales = {name: t.view(torch.float8_e4m3fn) for name, t in given.scales.items()}
    given.scales = {name: t.float() if scales == torch.float32 else t.view(scales) for name, t in given.scales.items()}
    load_split(nvfp4_layer, given)
    finish(nvfp4_layer)
    check_layer(nvfp4_layer, experts)


@pytest.mark.parametrize("form", ["[E, 2]", "[E]", "stacked"])
def test_global_scales_of_all_experts_in_one_tensor(nvfp4_layer, form):
    """vLLM hands a fused checkpoint's global scales over as if they were expert 0's, once a shard."""
    experts = Experts(NVFP4_SIZES, fmt=NVFP4)
    if form == "[E]":
        experts.globals["w13"] = experts.globals["w13"][:, :1].expand(-1, 2)
    w13 = experts.globals["w13"] if form != "[E]" else experts.globals["w13"][:, 0]
    skip = tuple(f"{e}.{shard}.weight_scale_2" for e in range(4) for shard in ("w1", "w2", "w3"))
    load_split(nvfp4_layer, experts, skip=skip if form != "stacked" else tuple(s for s in skip if "w2" in s))
    if form != "stacked":
        load_one(nvfp4_layer, "w13_weight_scale_2", w13, "w1", 0)
        load_one(nvfp4_layer, "w13_weight_scale_2", w13, "w3", 1)
        load_one(nvfp4_layer, "w2_weight_scale_2", experts.globals["w2"][:, 0], "w2", 0)
    else:
        load_one(nvfp4_layer, "w2_weight_scale_2", experts.globals["w2"], None, None)
    finish(nvfp4_layer)
    check_layer(nvfp4_layer, experts)


@pytest.mark.parametrize("interleaved", [False, True])
def test_stacked_nvfp4_tensors_hold_gate_and_up_globals(interleaved):
    """Codes and scales of gate and up in one tensor, with a pair of global scales."""
    sizes = Sizes(experts=1, hidden=64, intermediate=96)
    experts = Experts(sizes, fmt=NVFP4)
    packed = {
        "w13": packing.allocate(1, 192, 64, gated=True, has_bias=False, device="cpu", weight_format=NVFP4),
        "w2": packing.allocate(1, 64, 96, gated=False, has_bias=False, device="cpu", weight_format=NVFP4),
    }
    shape = ExpertShape(1, 64, 96, 96, 0, True, interleaved, False)
    loader = ExpertLoader(NAME, CT_NVFP4_SCHEME, shape, packed, torch.float16)
    order = torch.arange(192).view(2, 96).T.reshape(-1) if interleaved else torch.arange(192)
    loader.load("w13", "codes", experts.codes["w13"][:, order], None, None)
    loader.load("w13", "scales", experts.scales["w13"][:, order], None, None)
    loader.load("w13", "global", experts.globals["w13"].reciprocal(), None, None)
    for kind, source in (("codes", experts.codes), ("scales", experts.scales)):
        loader.load("w2", kind, source["w2"], None, None)
    loader.load("w2", "global", experts.globals["w2"].reciprocal(), None, None)
    loader.check_complete()
    for projection, rows, k in (("w13", 192, 64), ("w2", 64, 96)):
        weight, _ = packing.unpack_expert(
            packed[projection],
            0,
            dtype=torch.float16,
            k=k,
            out_features=rows,
            gated=projection == "w13",
            out_dtype=torch.float64,
        )
        assert torch.equal(weight, experts.dense(projection)[0])


@pytest.mark.parametrize("checkpoint", [CT_MXFP4, CT_NVFP4, GPT_OSS])
def test_load_peak_does_not_grow_with_the_experts(checkpoint):
    """Beyond the preallocated parameters a load takes a few times one expert, and keeps nothing."""
    sizes = Sizes(experts=64, hidden=512, intermediate=256)
    with engine():
        layer = build(checkpoint, sizes, **(GPT_OSS_LAYER if checkpoint is GPT_OSS else {}))
    experts = Experts(sizes, bias=checkpoint is GPT_OSS, fmt=NVFP4 if checkpoint is CT_NVFP4 else MXFP4)
    load = load_stacked if checkpoint is GPT_OSS else load_split
    load(layer, experts)  # index tables of the packing are made once
    one_expert = sum(p[0].numel() * p.element_size() for p in layer.parameters() if p.numel())
    peak, kept = allocation_peak(lambda: load(layer, experts))
    assert peak < 6 * one_expert
    assert kept == 0


def test_missing_tensors_are_named(layer):
    load_split(layer, Experts(SIZES), skip=("1.w2.weight_scale", "3.w3.weight_packed"))
    with pytest.raises(ValueError, match=NAME) as error:
        finish(layer)
    assert "lacks 2 tensors" in str(error.value)
    assert "expert 1 w2_weight_scale, expert 3 w3_weight_packed" in str(error.value)


def test_a_layer_nothing_was_loaded_into_is_refused(layer):
    with pytest.raises(ValueError, match=r"lacks 24 tensors.*expert 0 w1_weight_packed.* and 16 more"):
        finish(layer)


def test_missing_bias_is_named():
    with engine():
        layer = build(GPT_OSS, SIZES, **GPT_OSS_LAYER)
    experts = Experts(SIZES, bias=True)
    experts.bias.pop("w2")
    for projection in ("w13", "w2"):
        for suffix, source in (("weight", experts.codes), ("weight_scale", experts.scales), ("bias", experts.bias)):
            if projection in source:
                load_one(layer, f"{projection}_{suffix}", source[projection], None, None)
    with pytest.raises(ValueError, match=r"lacks 4 tensors.*expert 0 w2_bias, expert 1 w2_bias"):
        finish(layer)


def test_missing_dense_weight_is_named_once():
    with engine():
        layer = build(None, SIZES)
    load_one(layer, "w2_weight", torch.zeros(96, 160, dtype=torch.bfloat16), "w2", 0)
    with pytest.raises(
        ValueError, match=r"lacks 11 tensors.*expert 0 w1_weight, expert 0 w3_weight, expert 1 w1_weight"
    ):
        finish(layer)


@pytest.mark.parametrize(
    ("tensor", "shard", "value", "message"),
    [
        ("w13_weight_packed", "w1", torch.zeros(159, 48), r"expert 2: w1_weight_packed must have shape \(160, 48\)"),
        ("w2_weight_scale", "w2", torch.zeros(96, 6), r"expert 2: w2_weight_scale must have shape \(96, 5\)"),
        ("w13_weight_packed", "w3", torch.zeros(160, 48), r"w3_weight_packed must be .*int8, found torch.float32"),
        ("w13_weight_scale", "w1", torch.zeros(160, 3).long(), r"w1_weight_scale must be .*found torch.int64"),
        ("w13_weight_packed", "w2", torch.zeros(160, 48).byte(), r"unknown shard 'w2'"),
        ("w13_weight_packed", None, torch.zeros(3, 320, 48).byte(), r"must hold 4 experts, found shape \(3, 320, 48\)"),
        ("w13_weight_packed", None, torch.zeros(4, 319, 48).byte(), r"w13_weight_packed must have shape \(320, 48\)"),
    ],
)
def test_wrong_tensors_name_layer_expert_and_tensor(layer, tensor, shard, value, message):
    with pytest.raises(ValueError, match=rf"{NAME}.*{message}"):
        load_one(layer, tensor, value, shard, None if shard is None else 2)


BAD_GLOBAL = r"w1_weight_scale_2 global scale must be positive and finite, found"


@pytest.mark.parametrize(
    ("tensor", "shard", "value", "message"),
    [
        ("w13_weight_scale_2", "w1", torch.tensor(0.0), rf"expert 2: {BAD_GLOBAL} 0\.0"),
        ("w13_weight_scale_2", "w1", torch.tensor(-1.0), rf"expert 2: {BAD_GLOBAL} -1\.0"),
        ("w13_weight_scale_2", "w1", torch.tensor(float("nan")), rf"expert 2: {BAD_GLOBAL} nan"),
        ("w13_weight_scale_2", "w1", torch.tensor([float("inf")]), rf"expert 2: {BAD_GLOBAL} inf"),
        ("w13_weight_scale_2", "w1", torch.tensor(2.0**125), r"expert 2: w13 global scale must be in 2\^-135.*found 4"),
        ("w13_weight_scale_2", "w1", torch.tensor(2.0**-136), r"expert 2: w13 global scale must be in.*found 1\.1"),
        ("w13_weight_scale_2", "w1", torch.tensor(1), r"expert 2: w1_weight_scale_2 must be .*found torch.int64"),
        (
            "w13_weight_scale_2",
            "w1",
            torch.ones(3),
            r"w1 global scales of all experts .*\(4, 2\), found \(3,\)",
        ),
        ("w2_weight_scale_2", "w2", torch.ones(4, 2), r"w2 global scales of all experts .*\(4,\), found \(4, 2\)"),
        (
            "w2_weight_scale_2",
            None,
            torch.ones(4, 2),
            r"expert 0: w2_weight_scale_2 must be one value, found",
        ),
        ("w13_weight", "w3", torch.zeros(208, 39).byte(), r"expert 2: w3_weight must have shape \(208, 40\), found"),
        ("w13_weight", "w3", torch.zeros(208, 40), r"expert 2: w3_weight must be torch.uint8 or .*found torch.float32"),
        ("w2_weight_scale", "w2", torch.zeros(80, 12).byte(), r"expert 2: w2_weight_scale must have shape \(80, 13\)"),
        (
            "w2_weight_scale",
            "w2",
            torch.zeros(80, 13).byte().view(torch.float8_e8m0fnu),
            r"w2_weight_scale must be torch.uint8 or torch.float8_e4m3fn or torch.float32, found torch.float8_e8m0fnu",
        ),
    ],
)
def test_wrong_nvfp4_tensors_name_layer_expert_and_tensor(nvfp4_layer, tensor, shard, value, message):
    expert = None if shard is None else 2
    skip = (f"2.{shard}.{tensor.partition('_')[2]}",)
    load_split(nvfp4_layer, Experts(NVFP4_SIZES, fmt=NVFP4), skip=skip)
    with pytest.raises(ValueError, match=rf"{NAME}.*{message}"):
        load_one(nvfp4_layer, tensor, value, shard, expert)
    if shard is not None:
        with pytest.raises(ValueError, match=r"lacks \d+ tensors? of"):
            finish(nvfp4_layer)  # and nothing half-loaded serves


@pytest.mark.parametrize(("byte", "value"), [(0x7F, "nan"), (0xFF, "nan"), (0xB8, r"-1\.0"), (0x81, r"-0\.00195")])
def test_nan_and_negative_e4m3_scales_are_refused(nvfp4_layer, byte, value):
    experts = Experts(NVFP4_SIZES, fmt=NVFP4)
    experts.scales["w13"][1, 208 + 7, 2] = byte
    message = rf"{NAME}: expert 1: w3 scale of row 7, group 2 is {value}.*byte {byte:#04x}.*expected .* 0 to 448"
    with pytest.raises(ValueError, match=message):
        load_split(nvfp4_layer, experts)


@pytest.mark.parametrize("bad", [0.3, -2.0, 449.0, float("nan"), float("inf")])
def test_fp32_scales_that_are_no_e4m3_number_are_refused(nvfp4_layer, bad):
    experts = Experts(NVFP4_SIZES, fmt=NVFP4)
    experts.scales = {name: t.view(torch.float8_e4m3fn).float() for name, t in experts.scales.items()}
    experts.scales["w2"][3, 5, 1] = bad
    with pytest.raises(ValueError, match=rf"{NAME}: expert 3: w2 scale.*row 5, group 1"):
        load_split(nvfp4_layer, experts)


def test_e4m3_scales_in_an_mxfp4_checkpoint_are_refused(layer):
    scales = torch.ones(160, 3).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"w1_weight_scale must be .*e8m0fnu.*found torch.float8_e4m3fn"):
        load_one(layer, "w13_weight_scale", scales, "w1", 0)


def test_missing_global_scales_are_named(nvfp4_layer):
    load_split(nvfp4_layer, Experts(NVFP4_SIZES, fmt=NVFP4), skip=("1.w2.weight_scale_2", "3.w3.weight_scale_2"))
    with pytest.raises(ValueError, match=NAME) as error:
        finish(nvfp4_layer)
    assert "lacks 2 tensors" in str(error.value)
    assert "expert 1 w2_weight_scale_2, expert 3 w3_weight_scale_2" in str(error.value)


def test_missing_scales_of_activations_are_not_missed(nvfp4_layer):
    experts = Experts(NVFP4_SIZES, fmt=NVFP4)
    load_split(nvfp4_layer, experts, skip=tuple(f"{e}.{s}.input_scale" for e in range(4) for s in ("w1", "w2", "w3")))
    finish(nvfp4_layer)
    check_layer(nvfp4_layer, experts)


def test_nan_scale_is_refused(layer):
    experts = Experts(SIZES)
    experts.scales["w2"][3, 7, 1] = 255
    with pytest.raises(ValueError, match=rf"{NAME}: expert 3: w2 scale of row 7, group 1.*255"):
        load_split(layer, experts)


def test_scale_errors_name_the_tensor_and_its_own_row(layer):
    experts = Experts(SIZES)
    experts.scales["w13"][1, 160 + 7, 2] = 255  # rows of gate come before those of up
    with pytest.raises(ValueError, match=rf"{NAME}: expert 1: w3 scale of row 7, group 2.*255"):
        load_split(layer, experts)


def test_gate_and_up_scales_of_different_dtypes(layer):
    """128 is a legal byte and, as a float, a legal power of two: joining must not turn one into the other."""
    experts = Experts(SIZES)
    experts.scales["w13"][0, 160:] = 128
    for shard, scales in zip(("w1", "w3"), experts.scales["w13"][0].chunk(2), strict=True):
        given = torch.exp2(scales.float() - 127) if shard == "w1" else scales
        load_one(layer, "w13_weight_scale", given, shard, 0)
    load_split(layer, experts, skip=("0.w1.weight_scale", "0.w3.weight_scale"))
    finish(layer)
    check_layer(layer, experts)


def test_nan_bias_is_refused():
    with engine():
        layer = build(GPT_OSS, SIZES, **GPT_OSS_LAYER)
    experts = Experts(SIZES, bias=True)
    experts.bias["w13"][1, 5] = float("nan")
    with pytest.raises(ValueError, match=rf"{NAME}: expert 1: w13_bias holds NaN or infinity"):
        load_stacked(layer, experts)


def test_dense_experts_are_quantised_while_loading():
    with engine():
        layer = build(None, SIZES)
    gen = torch.Generator().manual_seed(3)
    dense = {
        "w13": torch.randn(4, 320, 96, generator=gen).bfloat16(),
        "w2": torch.randn(4, 96, 160, generator=gen).bfloat16(),
    }
    experts = Experts(SIZES)
    for projection, weights in dense.items():
        pairs = [quantize_mxfp4(w) for w in weights]
        experts.codes[projection] = torch.stack([codes for codes, _ in pairs])
        experts.scales[projection] = torch.stack([scales for _, scales in pairs])
    for e in range(4):
        load_one(layer, "w13_weight", dense["w13"][e, :160], "w1", e)
        load_one(layer, "w2_weight", dense["w2"][e], "w2", e)
        load_one(layer, "w13_weight", dense["w13"][e, 160:], "w3", e)
    finish(layer)
    check_layer(layer, experts)


def nvfp4_online():
    return engine(additional={"humming": {"online_format": "nvfp4"}})


def test_dense_experts_are_quantised_to_nvfp4_while_loading():
    with nvfp4_online():
        layer = build(None, NVFP4_SIZES)
    gen = torch.Generator().manual_seed(3)
    dense = {
        "w1": torch.randn(4, 208, 80, generator=gen).bfloat16(),
        "w3": torch.randn(4, 208, 80, generator=gen).bfloat16() * 3,
        "w2": torch.randn(4, 80, 208, generator=gen).bfloat16(),
    }
    for shard, weights in dense.items():
        for e, weight in enumerate(weights):
            load_one(layer, f"{'w2' if shard == 'w2' else 'w13'}_weight", weight, shard, e)
    finish(layer)
    for e in range(4):
        gate, up, down = (dequantize_nvfp4(*quantize_nvfp4(dense[s][e]), torch.float64) for s in ("w1", "w3", "w2"))
        packed = packing.PackedProjection(layer.w13_packed, layer.w13_row_scale, None, NVFP4)
        assert torch.equal(unpacked(packed, e, 416, 80, True)[0], torch.cat([gate, up]))
        packed = packing.PackedProjection(layer.w2_packed, layer.w2_row_scale, None, NVFP4)
        assert torch.equal(unpacked(packed, e, 80, 208, False)[0], down)


def test_ranks_quantise_with_the_global_scale_of_the_whole_tensor():
    """The largest weight lies on one rank; the other's weights must not depend on that."""
    dense = torch.randn(64, 96, generator=torch.Generator().manual_seed(1))
    dense[:, 90] *= 50
    whole = dequantize_nvfp4(*quantize_nvfp4(dense), torch.float64)
    for rank in range(2):
        packed = packing.allocate(1, 64, 48, gated=False, has_bias=False, device="cpu", weight_format=NVFP4)
        shape = ExpertShape(1, 64, 96, 48, rank, True, False, False)
        loader = ExpertLoader(NAME, ONLINE["nvfp4"], shape, {"w2": packed}, torch.bfloat16)
        loader.load("w2", "dense", dense, "w2", 0)
        assert torch.equal(unpacked(packed, 0, 64, 48, False)[0], whole[:, rank * 48 : rank * 48 + 48])


@pytest.mark.parametrize("shard", ["w1", "w2"])
def test_dense_nan_is_refused_by_name_for_nvfp4(shard):
    with nvfp4_online():
        layer = build(None, NVFP4_SIZES)
    weight = torch.zeros((208, 80) if shard == "w1" else (80, 208), dtype=torch.bfloat16)
    weight[9, 3] = float("nan")
    with pytest.raises(ValueError, match=rf"{NAME}: expert 2: {shard}_weight:.*NaN or infinity in row 9"):
        load_one(layer, "w13_weight" if shard == "w1" else "w2_weight", weight, shard, 2)


def test_dense_nan_is_refused_by_name():
    with engine():
        layer = build(None, SIZES)
    weight = torch.zeros(160, 96, dtype=torch.bfloat16)
    weight[9, 3] = float("inf")
    with pytest.raises(ValueError, match=rf"{NAME}: expert 2: w3_weight:.*NaN or infinity in row 9"):
        load_one(layer, "w13_weight", weight, "w3", 2)


def test_loading_after_packing_is_an_error(layer):
    param = layer.w13_weight_packed
    load_split(layer, Experts(SIZES))
    finish(layer)
    with pytest.raises(RuntimeError, match="came after the weights were packed"):
        param.weight_loader(param, torch.zeros(1), "name", shard_id="w1", expert_id=0)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("intermediate", [160, 2880])
@pytest.mark.parametrize(("gated", "interleaved"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("bias", [False, True])
def test_tensor_parallel_shares_add_up(tp, intermediate, gated, interleaved, bias):
    """The ranks' shares, cut on scale groups, are the whole expert; the down bias lies on one rank."""
    sizes = Sizes(experts=1, hidden=64, intermediate=intermediate)
    experts = Experts(sizes, gated=gated, bias=bias)
    shard = -(-(intermediate // 32) // tp) * 32
    multiplier = 2 if gated else 1
    gates, downs, biases = [], [], torch.zeros(64, dtype=torch.float64)
    for rank in range(tp):
        shape = ExpertShape(1, 64, intermediate, shard, rank, gated, interleaved, bias)
        packed = {
            "w13": packing.allocate(
                1, multiplier * shard, 64, gated=gated, has_bias=bias, device="cpu", pad_rows_to=128
            ),
            "w2": packing.allocate(1, 64, shard, gated=False, has_bias=bias, device="cpu"),
        }
        loader = ExpertLoader(NAME, PLAIN_MXFP4, shape, packed, torch.bfloat16)
        for kind, source in (("codes", experts.codes), ("scales", experts.scales), ("bias", experts.bias)):
            if not source:
                continue
            if interleaved:
                loader.load("w13", kind, source["w13"][0], "gpt_oss_w13", 0)
            else:
                halves = source["w13"][0].chunk(2) if gated else [source["w13"][0]]
                for name, half in zip(("w1", "w3"), halves, strict=False):
                    loader.load("w13", kind, half, name, 0)
            loader.load("w2", kind, source["w2"][0], "w2", 0)
        loader.check_complete()
        n = shape.channels
        weight, _ = unpacked(packed["w13"], 0, multiplier * shard, 64, gated)
        gates.append(weight.view(multiplier, shard, 64)[:, :n])
        down, down_bias = unpacked(packed["w2"], 0, 64, shard, False)
        assert not down[:, n:].any()
        downs.append(down[:, :n])
        if down_bias is not None:
            biases += down_bias
    w13 = experts.dense("w13")[0]
    if interleaved:
        w13 = torch.cat([w13[::2], w13[1::2]])
    assert torch.equal(torch.cat(gates, 1).reshape(-1, 64), w13)
    assert torch.equal(torch.cat(downs, 1), experts.dense("w2")[0])
    if bias:
        assert torch.equal(biases, experts.bias["w2"][0].double())


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize(("gated", "intermediate"), [(True, 208), (False, 1856)])
def test_tensor_parallel_shares_of_nvfp4_add_up(tp, gated, intermediate):
    """1856 / 8 = 232 would cut a scale group of 16: shares are 240, the last one less."""
    sizes = Sizes(experts=1, hidden=64, intermediate=intermediate)
    experts = Experts(sizes, gated=gated, fmt=NVFP4)
    shard, multiplier = -(-(intermediate // 16) // tp) * 16, 2 if gated else 1
    gates, downs = [], []
    for rank in range(tp):
        shape = ExpertShape(1, 64, intermediate, shard, rank, gated, False, False)
        make = {"has_bias": False, "device": "cpu", "weight_format": NVFP4}
        packed = {
            "w13": packing.allocate(1, multiplier * shard, 64, gated=gated, pad_rows_to=128, **make),
            "w2": packing.allocate(1, 64, shard, gated=False, **make),
        }
        loader = ExpertLoader(NAME, MODELOPT_NVFP4, shape, packed, torch.bfloat16)
        for shard_name, projection in (("w1", "w13"), ("w2", "w2"), ("w3", "w13")):
            for kind in ("codes", "scales", "global"):
                if gated or shard_name != "w3":
                    loader.load(projection, kind, experts.tensor(kind, projection, 0, shard_name), shard_name, 0)
        loader.check_complete()
        weight, _ = unpacked(packed["w13"], 0, multiplier * shard, 64, gated)
        gates.append(weight.view(multiplier, shard, 64)[:, : shape.channels])
        down, _ = unpacked(packed["w2"], 0, 64, shard, False)
        assert not down[:, shape.channels :].any()
        downs.append(down[:, : shape.channels])
    assert torch.equal(torch.cat(gates, 1).reshape(-1, 64), experts.dense("w13")[0])
    assert torch.equal(torch.cat(downs, 1), experts.dense("w2")[0])


def test_online_schemes_are_known():
    assert {name: scheme.weight_format for name, scheme in ONLINE.items()} == {"mxfp4": MXFP4, "nvfp4": NVFP4}


def test_experts_of_other_ranks_are_skipped(layer, monkeypatch):
    monkeypatch.setattr(
        type(layer), "_map_global_expert_id_to_local_expert_id", lambda self, expert: expert - 4 if expert >= 4 else -1
    )
    monkeypatch.setattr(layer.moe_config, "num_experts", 8)
    monkeypatch.setattr(layer.moe_config, "num_logical_experts", 8)
    experts = Experts(SIZES)
    skipped = load_one(layer, "w2_weight_packed", experts.codes["w2"][0], "w2", 0)
    assert skipped is False
    assert load_one(layer, "w2_weight_packed", experts.codes["w2"][1], "w2", 5) is True
    load_one(layer, "w2_weight_scale", experts.scales["w2"][1], "w2", 5)
    packed = packing.PackedProjection(layer.w2_packed, layer.w2_row_scale, None, MXFP4)
    weight, _ = unpacked(packed, 1, 96, 160, False)
    expected = dequantize_mxfp4(experts.codes["w2"][1], experts.scales["w2"][1], torch.float64)
    assert torch.equal(weight, expected)


def test_host_tensors_are_copied_beside_the_packing_of_the_last_projection(monkeypatch):
    log = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            log.append(f"{self.name} waits for {other.name}")

    class OnGpu:
        def record_stream(self, stream):
            log.append(f"kept until {stream.name} is done")

    class Host:
        device = torch.device("cpu")

        def to(self, device):
            log.append(f"copy on {running[-1]}")
            return moved

    @contextlib.contextmanager
    def on(stream):
        running.append(stream.name)
        yield
        running.pop()

    gpu, moved, running = torch.device("cuda:3"), OnGpu(), ["main"]
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("copies"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("main"))
    monkeypatch.setattr(torch.cuda, "stream", on)
    loading._copy_stream.cache_clear()
    try:
        assert loading._moved(Host(), gpu) is moved
        assert log == ["copy on copies", "main waits for copies", "kept until main is done"]
        log.clear()
        tensor = SimpleNamespace(device=gpu, to=Host().to)  # quantised there while loading
        assert loading._moved(tensor, gpu) is moved
        assert log == ["copy on main"]
        host = torch.ones(2)
        assert loading._moved(host, torch.device("cpu")) is host
    finally:
        loading._copy_stream.cache_clear()
