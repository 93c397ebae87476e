# SPDX-License-Identifier: Apache-2.0
"""The MoE method on real vLLM layers: apply() by the reference against float64, and what it refuses."""

import math
from types import SimpleNamespace

import pytest
import torch
from layers import (
    CT_MXFP4,
    CT_NVFP4,
    GPT_OSS,
    MODELOPT,
    Experts,
    Sizes,
    apply,
    build,
    engine,
    finish,
    load_one,
    load_split,
    load_stacked,
    relative_error,
    routing,
)

import vllm_humming
from vllm_humming import compat
from vllm_humming.moe import packing, reference
from vllm_humming.moe.activation import activation_spec
from vllm_humming.moe.experts import packed_of
from vllm_humming.moe.packing import CODE_BYTES
from vllm_humming.moe.weight_formats import NVFP4
from vllm_humming.quant_methods.tally import Tally

SIZES = Sizes()
ACTIVATIONS = {
    "silu": {},
    "silu-limit": {"activation": "silu", "swiglu_limit": 0.5},
    "swigluoai_uninterleave": {"swiglu_alpha": 1.702, "swiglu_beta": 1.0, "swiglu_limit": 0.75},
    "gelu_tanh": {},
    "relu2_no_mul": {},
}


def ready(experts, *, sizes=SIZES, checkpoint=CT_MXFP4, **kwargs):
    """A loaded layer, stacked for gpt-oss and expert by expert otherwise. Call it under engine()."""
    layer = build(checkpoint, sizes, **kwargs)
    (load_stacked if checkpoint is GPT_OSS else load_split)(layer, experts)
    finish(layer)
    return layer


def oracle(layer, experts, x, weights, ids, expert_map=None):
    spec = layer.quant_method.activation
    w13, b13 = experts.dense("w13"), experts.bias.get("w13")
    if spec.interleaved:
        w13 = torch.cat([w13[:, ::2], w13[:, 1::2]], 1)
        b13 = torch.cat([b13[:, ::2], b13[:, 1::2]], 1)
    return reference.oracle_moe(
        x,
        weights,
        ids,
        expert_map,
        w13,
        b13,
        experts.dense("w2"),
        experts.bias.get("w2"),
        activation=spec.code,
        alpha=spec.alpha,
        beta=spec.beta,
        limit=spec.limit,
        router_weight_on_input=layer.apply_router_weight_on_input,
        fp8_activations=layer.quant_method.weight_format.path == "w4a8",
    )


@pytest.fixture(scope="module")
def silu():
    """A plain layer with its experts, loaded once."""
    experts = Experts(SIZES)
    with engine():
        return ready(experts), experts


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_activations(name, dtype):
    kwargs = {"activation": name} | ACTIVATIONS[name]
    experts = Experts(SIZES, gated=not name.endswith("no_mul"))
    with engine():
        layer = ready(experts, dtype=dtype, **kwargs)
    x, weights, ids = routing(9, SIZES)
    x = x.to(dtype)
    y = apply(layer, x, weights, ids)
    assert y.dtype == dtype
    assert relative_error(y, oracle(layer, experts, x, weights, ids)) < 4e-3


@pytest.mark.parametrize("checkpoint", [CT_NVFP4, MODELOPT])
@pytest.mark.parametrize("activation", ["silu", "relu2_no_mul"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nvfp4(checkpoint, activation, dtype):
    """Gate, up and down of each expert have global scales of their own, the up half's twice the gate's."""
    sizes = Sizes(hidden=80, intermediate=208)
    experts = Experts(sizes, gated=activation == "silu", fmt=NVFP4)
    with engine():
        layer = ready(experts, sizes=sizes, checkpoint=checkpoint, dtype=dtype, activation=activation)
    x, weights, ids = routing(9, sizes)
    x = x.to(dtype)
    y = apply(layer, x, weights, ids)
    assert relative_error(y, oracle(layer, experts, x, weights, ids)) < 4e-3
    if activation == "silu":  # a method that took one global scale for both halves would be far off
        experts.globals["w13"][:, 1] /= 2
        assert relative_error(y, oracle(layer, experts, x, weights, ids)) > 0.1


@pytest.mark.parametrize("tokens", [1, 33])
def test_gpt_oss(tokens):
    experts = Experts(SIZES, bias=True)
    with engine():
        layer = ready(experts, checkpoint=GPT_OSS, has_bias=True, activation="swigluoai")
    spec = layer.quant_method.activation
    assert (spec.alpha, spec.beta, spec.limit, spec.interleaved) == (1.702, 1.0, 7.0, True)
    x, weights, ids = routing(tokens, SIZES)
    assert relative_error(apply(layer, x, weights, ids), oracle(layer, experts, x, weights, ids)) < 4e-3


def test_no_tokens(silu):
    layer, _ = silu
    y = apply(layer, torch.empty(0, 96).bfloat16(), torch.empty(0, 2), torch.empty(0, 2, dtype=torch.int32))
    assert y.shape == (0, 96)
    assert y.dtype == torch.bfloat16


def test_ids_of_nobody_give_exact_zeros_and_inputs_stay(silu):
    layer, experts = silu
    x, weights, ids = routing(16, SIZES)
    ids[:8] = -1
    ids[9, 0] = -1
    ids[10, 1] = 1000
    x[:8] = float("nan")  # rows that belong to no expert may hold anything
    before = [t.clone() for t in (x, weights, ids)]
    y = apply(layer, x, weights, ids)
    assert torch.equal(y[:8], torch.zeros(8, 96).bfloat16())
    assert relative_error(y[8:], oracle(layer, experts, x[8:], weights[8:], ids[8:])) < 4e-3
    for now, then in zip((x, weights, ids), before, strict=True):
        assert torch.equal(now.nan_to_num(9.0), then.nan_to_num(9.0))
    everyone_away = apply(layer, x, weights, torch.full_like(ids, -1))
    assert not everyone_away.any()


def test_ids_may_be_int64_and_x_strided(silu):
    layer, _ = silu
    x, weights, ids = routing(5, SIZES)
    wide = torch.cat([x, x], 1)[:, :96]
    assert torch.equal(apply(layer, wide, weights.double(), ids.long()), apply(layer, x, weights, ids))
    assert layer.quant_method.topk_indices_dtype == torch.int32


def test_repeated_ids_count_twice(silu):
    layer, experts = silu
    x, weights, ids = routing(6, SIZES)
    ids[:, 1] = ids[:, 0]
    assert relative_error(apply(layer, x, weights, ids), oracle(layer, experts, x, weights, ids)) < 4e-3


def test_expert_map(silu, monkeypatch):
    layer, experts = silu
    expert_map = torch.tensor([-1, -1, 2, 3, 0, 1, -1, -1], dtype=torch.int32)
    monkeypatch.setattr(type(layer), "expert_map", property(lambda self: expert_map))
    x, weights, ids = routing(40, Sizes(experts=8))
    y = apply(layer, x, weights, ids)
    assert relative_error(y, oracle(layer, experts, x, weights, ids, expert_map)) < 4e-3


def test_router_weight_on_input():
    sizes = Sizes(top_k=1)
    experts = Experts(sizes)
    with engine():
        layer = ready(experts, sizes=sizes, apply_router_weight_on_input=True)
    x, weights, ids = routing(7, sizes)
    weights = weights * 0.375
    assert relative_error(apply(layer, x, weights, ids), oracle(layer, experts, x, weights, ids)) < 4e-3


def test_fp16_and_bf16_layers_differ_only_in_rounding():
    experts, outputs = Experts(SIZES), []
    x, weights, ids = routing(5, SIZES)
    for dtype in (torch.bfloat16, torch.float16):
        with engine():
            outputs.append(apply(ready(experts, dtype=dtype), x.to(dtype), weights, ids))
    assert relative_error(outputs[0], outputs[1]) < 8e-3


@pytest.mark.parametrize("activation", ["16bit", "fp8"])
@pytest.mark.parametrize("checkpoint", [CT_MXFP4, CT_NVFP4, GPT_OSS, None])
def test_dummy_weights(checkpoint, activation):
    """What vLLM's dummy loader leaves in the parameters, in any version, ends in finite, non-zero weights."""
    from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight

    if checkpoint is CT_NVFP4 and activation == "fp8":
        pytest.skip("FP8 activations need MXFP4 weights")
    kwargs = {"has_bias": True, "activation": "swigluoai"} if checkpoint is GPT_OSS else {}
    with engine(load_format="dummy", additional={"humming": {"activation": activation}}):
        layer = build(checkpoint, SIZES, **kwargs)
        for param in layer.state_dict().values():
            initialize_single_dummy_weight(param)
        layer.w2_packed.data.random_(0, 256)
        finish(layer)
        y = apply(layer, *routing(64, SIZES))
    assert torch.isfinite(y).all()
    assert y.any()
    assert activation == "fp8" or torch.equal(layer.w13_row_scale, torch.ones_like(layer.w13_row_scale))


@pytest.mark.parametrize(("checkpoint", "activation"), [(CT_MXFP4, "16bit"), (CT_NVFP4, "16bit"), (CT_MXFP4, "fp8")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_filled_in_place(checkpoint, activation, dtype):
    """A benchmark that fills every parameter (shared protocol: uint8 scales 118..121, other uint8 anything)."""
    with engine(additional={"humming": {"activation": activation}}):
        layer = build(checkpoint, SIZES, dtype=dtype)
        for name, param in layer.named_parameters():
            if param.dtype == torch.uint8 and "scale" in name:
                param.data.random_(118, 122)
            elif param.dtype == torch.uint8:
                param.data.random_(0, 256)
            elif param.dtype == torch.bfloat16:
                param.data.normal_(std=0.02)
        codes = layer.w13_packed[..., :CODE_BYTES].clone()
        finish(layer)
    for parameters in packed_of(layer, layer.quant_method.weight_format).values():
        rows = parameters.row_scale.shape[1]
        for e in range(SIZES.experts):
            weight, _ = packing.unpack_expert(parameters, e, dtype=dtype, k=96, out_features=rows, gated=False)
            assert torch.isfinite(weight).all()
    assert torch.equal(layer.w13_packed[..., :CODE_BYTES], codes)


def test_a_state_packed_for_another_layout_does_not_fit():
    states = {}
    for activation, dtype in (("16bit", torch.bfloat16), ("16bit", torch.float16), ("fp8", torch.bfloat16)):
        with engine(additional={"humming": {"activation": activation}}):
            states[activation, dtype] = build(CT_MXFP4, SIZES, dtype=dtype).state_dict()
    shapes = [
        {name: value.shape for name, value in state.items() if "packed_for" not in name} for state in states.values()
    ]
    assert shapes[0] == shapes[1] == shapes[2]
    assert len({frozenset(state) for state in states.values()}) == 3


def test_restored_state_stays_bit_for_bit(silu):
    loaded, _ = silu
    state = {name: tensor.clone() for name, tensor in loaded.named_parameters()}
    with engine():
        layer = build(CT_MXFP4, SIZES)
        for name, tensor in state.items():
            getattr(layer, name).data.copy_(tensor)
        finish(layer)
    for name, tensor in state.items():
        assert torch.equal(getattr(layer, name), tensor)


def test_summary_line_counts_layers(monkeypatch):
    from vllm_humming.moe import method

    lines = []
    monkeypatch.setattr(method.logger, "info", lambda text, *args: lines.append(text % args))
    monkeypatch.setattr(method, "_TALLY", Tally("MoE layer", "experts"))

    def load_model(skip=()):
        with engine():
            layers = [build(CT_MXFP4, SIZES, name=f"model.layers.{n}.mlp.experts") for n in range(2)]
            for layer in layers:
                load_split(layer, Experts(SIZES), skip=skip)
                finish(layer)

    line = f"vllm-humming {vllm_humming.__version__}: 2 MoE layers run through vllm_humming "
    line += "(MXFP4 experts, reference path)"
    load_model()
    assert lines == [line]
    with pytest.raises(ValueError, match="lacks 1 tensor of"):
        load_model(skip=("1.w2.weight_scale",))
    load_model()  # a process that failed to load a model, or loaded another before, tells the same of the next
    assert lines == [line] * 2
    load_model()
    assert lines == [line] * 3


def method_module():
    from vllm_humming.moe import method

    return method


def fake_moe(**changes):
    parallel = SimpleNamespace(use_all2all_kernels=False, all2all_backend="allgather_reducescatter", enable_eplb=False)
    vars(parallel).update(changes.pop("parallel", {}))
    return SimpleNamespace(
        **{"is_lora_enabled": False, "moe_parallel_config": parallel, "intermediate_size": 2880, "tp_size": 1} | changes
    )


def method_for(moe, online="mxfp4"):
    from vllm_humming.moe.method import HummingMoEMethod
    from vllm_humming.options import HummingOptions
    from vllm_humming.quant_methods.schemes import ONLINE

    return HummingMoEMethod(moe, ONLINE[online], HummingOptions(), "model.layers.5.mlp.experts")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_lora_enabled": True}, "LoRA on experts"),
        (
            {"parallel": {"use_all2all_kernels": True, "all2all_backend": "moonep"}},
            "all-to-all backend 'moonep'.*allgather_reducescatter, .*deepep_low_latency",
        ),
    ],
)
def test_what_the_method_does_not_do_is_refused_by_layer(changes, message):
    with pytest.raises(NotImplementedError, match=rf"model\.layers\.5\.mlp\.experts: .*{message}"):
        method_for(fake_moe(**changes))


def test_allgather_backend_is_accepted():
    method_for(fake_moe(parallel={"use_all2all_kernels": True}))


@pytest.mark.parametrize(("tp", "expected"), [(1, 2880), (2, 1440), (4, 736), (8, 384)])
def test_a_rank_holds_whole_scale_groups(tp, expected):
    method = method_for(fake_moe(tp_size=tp))
    assert method.maybe_roundup_sizes(2880, 2880 // tp, torch.bfloat16, None) == (2880, expected)


@pytest.mark.parametrize(("tp", "expected"), [(1, 1856), (2, 928), (4, 464), (8, 240)])
def test_a_rank_holds_whole_scale_groups_of_nvfp4(tp, expected):
    """Nemotron-H: 1856 / 8 = 232 would cut a group of 16."""
    method = method_for(fake_moe(tp_size=tp, intermediate_size=1856), "nvfp4")
    assert method.maybe_roundup_sizes(2688, 1856 // tp, torch.bfloat16, None) == (2688, expected)


def test_sizes_that_cut_a_scale_group_are_refused():
    with engine(), pytest.raises(ValueError, match=r"hidden_size to be a multiple of 32, found 80"):
        build(CT_MXFP4, Sizes(hidden=80))
    with engine(), pytest.raises(ValueError, match=r"intermediate_size to be a multiple of 32, found 100"):
        build(CT_MXFP4, Sizes(intermediate=100))
    with engine(), pytest.raises(ValueError, match=r"NVFP4 needs hidden_size to be a multiple of 16, found 72"):
        build(CT_NVFP4, Sizes(hidden=72))


@pytest.mark.parametrize("activation", ["gelu", "silu_no_mul", "relu2", "swiglustep"])
def test_other_activations_are_refused_by_layer(activation):
    with engine(), pytest.raises(ValueError, match=rf"mlp\.experts: .*no activation '{activation}'; it has silu,"):
        build(CT_MXFP4, SIZES, activation=activation)


def test_swiglu_parameters_come_from_the_layer_then_the_model(monkeypatch):
    from vllm.model_executor.layers.fused_moe import MoEActivation

    moe = SimpleNamespace(activation=MoEActivation.SWIGLUOAI_UNINTERLEAVE, swiglu_alpha=1.5)
    layer = SimpleNamespace(swiglu_limit=7.0)
    monkeypatch.setattr(compat, "hf_text_config", lambda: None)
    with pytest.raises(ValueError, match=r"layer 3: activation 'swigluoai_uninterleave' needs swiglu_beta"):
        activation_spec(layer, moe, "layer 3")
    monkeypatch.setattr(compat, "hf_text_config", lambda: SimpleNamespace(swiglu_beta=0.25, swiglu_limit=3.0))
    spec = activation_spec(layer, moe, "layer 3")
    assert (spec.alpha, spec.beta, spec.limit, spec.interleaved) == (1.5, 0.25, 7.0, False)
    moe.activation, layer.swiglu_limit = MoEActivation.SILU, None
    monkeypatch.setattr(compat, "hf_text_config", lambda: None)
    assert activation_spec(layer, moe, "layer 3") == (reference.Activation.SWIGLU, 1.0, 0.0, math.inf, False)
    layer.swiglu_limit = 0.0
    assert activation_spec(layer, moe, "layer 3").limit == math.inf


@pytest.mark.parametrize(("wanted", "code", "path"), [("16bit", 0, "a16"), ("fp8", 2, "w4a8")])
@pytest.mark.parametrize(("activation", "gated"), [("silu", True), ("relu2_no_mul", False)])
def test_kernel_path_takes_scratch_and_tiles_by_shape(monkeypatch, activation, gated, wanted, code, path):
    """The branch of a GPU, on the op's CPU implementation: scratch from the workspace manager, tiles from select()."""
    import vllm_humming.moe.experts as experts_module
    from vllm_humming.moe import schedule

    asked, scratch = [], torch.empty(64, dtype=torch.uint8)
    monkeypatch.setattr(compat, "workspace", lambda shape, dtype: asked.append((shape, dtype)) or scratch)
    monkeypatch.setattr(schedule, "select", lambda *shape: asked.append(shape) or (3, 4))
    moe, passed = torch.ops.vllm_humming.moe, []
    fake_ops = SimpleNamespace(
        moe=lambda *args: passed.append(args) or moe(*args), moe_workspace_bytes=lambda *shape: sum(shape)
    )
    experts = Experts(SIZES, gated=gated)
    with engine(additional={"humming": {"activation": wanted}}):
        layer = ready(experts, activation=activation)
    layer.quant_method.experts.backend = "kernel"
    monkeypatch.setattr(experts_module, "torch", SimpleNamespace(**vars(torch) | {"ops": SimpleNamespace()}))
    monkeypatch.setattr(experts_module.torch.ops, "vllm_humming", fake_ops, raising=False)
    x, weights, ids = routing(5, SIZES)
    y = apply(layer, x, weights, ids)
    shape = (5, 2, 4, 96, 256)  # tokens, top-k, local experts, hidden, padded intermediate
    assert set(asked) == {(*shape, gated, 4, path), ((sum(shape) + code,), torch.uint8)}
    assert passed[0][10].data_ptr() == scratch.data_ptr()
    assert passed[0][12:] == (code, layer.quant_method.activation.code, 1.0, 0.0, math.inf, False, 3, 4)
    assert relative_error(y, oracle(layer, experts, x, weights, ids)) < 4e-3


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_fp8_activations(name):
    gated = not name.endswith("_no_mul")
    experts = Experts(SIZES, gated=gated)
    with engine(additional={"humming": {"activation": "fp8"}}):
        layer = ready(experts, **{"activation": name} | ACTIVATIONS[name])
    x, weights, ids = routing(33, SIZES)
    y = apply(layer, x, weights, ids)
    assert relative_error(y, oracle(layer, experts, x, weights, ids)) < 4e-3


def test_fp8_activations_of_gpt_oss():
    experts = Experts(SIZES, bias=True)
    with engine(additional={"humming": {"activation": "fp8"}}):
        layer = ready(experts, checkpoint=GPT_OSS, has_bias=True, activation="swigluoai")
    x, weights, ids = routing(9, SIZES)
    assert relative_error(apply(layer, x, weights, ids), oracle(layer, experts, x, weights, ids)) < 4e-3


def test_fp8_activations_of_a_checkpoint_quantised_while_loading():
    experts = Experts(SIZES)
    with engine(additional={"humming": {"activation": "fp8"}}):
        layer = build(None, SIZES)
        for e, (up, down) in enumerate(zip(experts.dense("w13"), experts.dense("w2"), strict=True)):
            for name, shard, part in (("w13", "w1", up[:160]), ("w13", "w3", up[160:]), ("w2", "w2", down)):
                load_one(layer, f"{name}_weight", part.bfloat16(), shard, e)  # values on the grid: quantised exactly
        finish(layer)
    x, weights, ids = routing(9, SIZES)
    assert relative_error(apply(layer, x, weights, ids), oracle(layer, experts, x, weights, ids)) < 4e-3


def test_rows_that_fp8_weights_do_not_hold_are_told_once_a_layer(monkeypatch):
    lines = []
    monkeypatch.setattr(method_module().logger, "info", lambda text, *args: lines.append(text % args))
    experts = Experts(SIZES)
    experts.codes["w2"][1, 7] = 0x11
    experts.scales["w2"][1, 7] = torch.tensor([127, 114, 127, 113, 115], dtype=torch.uint8)
    for activation in ("16bit", "fp8"):
        with engine(additional={"humming": {"activation": activation}}):
            ready(experts)
    total = sum(scales.numel() for scales in experts.scales.values())
    # 0.5 at 2^-13, 2^-14 and 2^-12 of a row whose largest weight is 0.5: all become zero.
    assert [line for line in lines if "rounded" in line] == [
        f"model.layers.0.mlp.experts: 3 of {total} scale groups ({300 / total:.2g} %) are too small beside the largest "
        f"of their row for e4m3 and were rounded; no weight changed by more than {2.0**-12:.1e} of its row's largest"
    ]
    assert any("(MXFP4 x FP8 experts, reference path)" in line for line in lines)


def test_refuses_activations_of_another_dtype():
    with engine():
        layer = ready(Experts(SIZES))
    x, weights, ids = routing(5, SIZES)
    with pytest.raises(ValueError, match=r"packed for torch.bfloat16 activations, found x of torch.float16"):
        apply(layer, x.half(), weights, ids)


def test_workspace_is_vllms(monkeypatch):
    from vllm.v1.worker.workspace import init_workspace_manager, is_workspace_manager_initialized

    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # needs a GPU
    if not is_workspace_manager_initialized():
        init_workspace_manager(torch.device("cpu"))
    large = compat.workspace((1024,), torch.uint8)
    assert compat.workspace((512,), torch.uint8).data_ptr() == large.data_ptr()
    assert large.shape == (1024,)
