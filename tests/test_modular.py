# SPDX-License-Identifier: Apache-2.0
"""The experts in vLLM's modular kernel, with vLLM's own prepare and finalize steps that run without a GPU.

BatchedPrepareAndFinalize lays tokens out as DeepEP's low-latency kernels do; MoEPrepareAndFinalizeNoDPEPModular hands
over rows as its high-throughput ones. The transport between ranks is not run here.
"""

import eplb
import pytest
import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from layers import CT_MXFP4, CT_NVFP4, Experts, Sizes, apply, build, engine, finish, load_split, relative_error, routing
from test_method import fake_moe, method_for, oracle
from vllm.model_executor.layers.fused_moe import all2all_utils

from vllm_humming import compat
from vllm_humming.moe import modular
from vllm_humming.moe.fp8 import quantize_activations
from vllm_humming.moe.layouts import scales_m_major
from vllm_humming.moe.weight_formats import NVFP4

SIZES = Sizes(hidden=256, intermediate=160)
MOST = 48  # rows of an expert
# name: checkpoint, options, arguments of the layer
CASES = {
    "mxfp4": (CT_MXFP4, {}, {}),
    "mxfp4-bias": (CT_MXFP4, {}, {"has_bias": True}),
    "mxfp4-relu2": (CT_MXFP4, {}, {"activation": "relu2_no_mul"}),
    "nvfp4": (CT_NVFP4, {}, {}),
    "nvfp4-bias-relu2": (CT_NVFP4, {}, {"has_bias": True, "activation": "relu2_no_mul"}),
    "w4a8": (CT_MXFP4, {"activation": "fp8"}, {}),
    "w4a8-bias": (CT_MXFP4, {"activation": "fp8"}, {"has_bias": True}),
    "w4a8-relu2": (CT_MXFP4, {"activation": "fp8"}, {"activation": "relu2_no_mul"}),
}


def experts_of(case, sizes=SIZES):
    checkpoint, _, kwargs = CASES[case]
    gated = not kwargs.get("activation", "").endswith("no_mul")
    fmt = {"fmt": NVFP4} if checkpoint is CT_NVFP4 else {}
    return Experts(sizes, gated=gated, bias=kwargs.get("has_bias", False), **fmt)


@pytest.fixture(autouse=True)
def vllm_without_gpu(monkeypatch):
    """Scratch of vLLM's kernel, and the quantisation that its batched step does, which is a Triton kernel."""
    import vllm.model_executor.layers.fused_moe.prepare_finalize.batched as batched
    from vllm.v1.worker.workspace import init_workspace_manager, is_workspace_manager_initialized

    def quantize(x, scale, dtype, per_token, block):
        assert (scale, dtype, per_token, block) == (None, torch.float8_e4m3fn, False, [128, 128])
        return quantize_activations(x)

    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    if not is_workspace_manager_initialized():
        init_workspace_manager(torch.device("cpu"))
    monkeypatch.setattr(batched, "moe_kernel_quantize_input", quantize)


@pytest.fixture
def backend(monkeypatch):
    """Builds the next layers for an all-to-all backend, with vLLM's local step in place of its transport."""
    from vllm.model_executor.layers.fused_moe import prepare_finalize

    asked = []

    def use(name):
        def make(moe, quant_config, routing_tables, allow_new_interface, use_monolithic):
            asked.append((moe, quant_config))
            assert allow_new_interface
            assert not use_monolithic
            if name in compat.BATCHED_BACKENDS:
                return prepare_finalize.BatchedPrepareAndFinalize(MOST, moe.num_local_experts, 1, 0)
            return prepare_finalize.make_moe_prepare_and_finalize_no_dp_ep(use_monolithic=False)

        monkeypatch.setattr(compat, "all2all_backend", lambda parallel: name)
        monkeypatch.setattr(all2all_utils, "maybe_make_prepare_finalize", make)
        return asked

    return use


def ready(case, sizes=SIZES, **kwargs):
    checkpoint, options, arguments = CASES[case]
    with engine(additional={"humming": options}):
        layer = build(checkpoint, sizes, **arguments, **kwargs)
        load_split(layer, experts_of(case, sizes))
        finish(layer)
    return layer


def plain(monkeypatch, case, *args, **kwargs):
    """The layer of a case without an all-to-all backend."""
    with monkeypatch.context() as patch:
        patch.setattr(compat, "all2all_backend", lambda parallel: None)
        layer = ready(case, *args, **kwargs)
    assert layer.quant_method.moe_kernel is None
    return layer


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", compat.MODULAR_BACKENDS)
def test_modular_kernel_gives_the_layer(monkeypatch, backend, name, case):
    asked = backend(name)
    layer = ready(case)
    method = layer.quant_method
    kernel = method.moe_kernel
    assert method.supports_internal_mk
    assert (asked[-1][0], asked[-1][1]) == (method.moe, method.moe_quant_config)
    fp8 = name in compat.BATCHED_BACKENDS and case.startswith("w4a8")
    assert method.moe_quant_config.quant_dtype == (torch.float8_e4m3fn if fp8 else None)
    assert not kernel.fused_experts.expects_unquantized_inputs  # DeepEP's low-latency step refuses to leave it open
    assert method.topk_indices_dtype is kernel.prepare_finalize.topk_indices_dtype()
    x, weights, ids = routing(MOST, SIZES)
    ids[:, 1][ids[:, 1] == 3] = -1  # few tokens of the last expert
    before = x.clone()
    y = apply(layer, x, weights, ids)
    assert torch.equal(x, before)
    expected = apply(plain(monkeypatch, case), x, weights, ids)
    if name in compat.BATCHED_BACKENDS:  # vLLM's step weights and sums in BF16
        assert relative_error(y, expected) < 8e-3
    else:
        assert torch.equal(y, expected)
    assert relative_error(y, oracle(layer, experts_of(case), x, weights, ids)) < 8e-3


@pytest.mark.parametrize("case", CASES)
def test_batched_rows_have_the_layers_bits(monkeypatch, backend, case):
    """With one expert a token of weight one nothing is rounded after the second GEMM, so the bits are the same."""
    backend("deepep_low_latency")
    sizes = Sizes(hidden=256, intermediate=160, top_k=1)
    layer, reference = ready(case, sizes), plain(monkeypatch, case, sizes)
    x, weights, _ = routing(MOST, sizes)
    weights = torch.ones_like(weights)
    loads = {
        "all experts": torch.arange(MOST) % 4,
        "one expert at its maximum": torch.full((MOST,), 2),
        "two empty experts": torch.arange(MOST) % 2 * 3,
        "tokens of nobody": torch.where(torch.arange(MOST) % 3 > 0, torch.arange(MOST) % 4, -1),
    }
    for load, ids in loads.items():
        ids = ids.int()[:, None]
        assert torch.equal(apply(layer, x, weights, ids), apply(reference, x, weights, ids)), load


def test_router_weight_on_input(monkeypatch, backend):
    sizes = Sizes(hidden=256, intermediate=160, top_k=1)
    x, weights, ids = routing(9, sizes)
    weights = weights * 0.5  # a power of two: scaling x by it is exact
    expected = apply(plain(monkeypatch, "mxfp4", sizes, apply_router_weight_on_input=True), x, weights, ids)
    for name in ("deepep_low_latency", "deepep_high_throughput"):
        backend(name)
        layer = ready("mxfp4", sizes, apply_router_weight_on_input=True)
        assert relative_error(apply(layer, x.clone(), weights, ids), expected) < 4e-3


def batch(sizes=SIZES, rows=MOST):
    """x [E, rows, H] bf16 whose rows past counts are NaN, counts of an empty and a full expert among them."""
    x = torch.randn(sizes.experts, rows, sizes.hidden, generator=torch.Generator().manual_seed(3)).bfloat16()
    counts = torch.tensor([5, 0, rows, 17], dtype=torch.int32)
    for e, count in enumerate(counts.tolist()):
        x[e, count:] = float("nan")
    return x, counts


def run(layer, x, scale, counts, rows=MOST):
    kernel_experts = layer.quant_method.moe_kernel.fused_experts
    meta = mk.ExpertTokensMetadata(expert_num_tokens=counts, expert_num_tokens_cpu=None)
    ids = torch.zeros((8, 2), dtype=torch.int64)
    shape = kernel_experts.moe_problem_size(x, layer.w13_packed, layer.w2_packed, ids)
    assert shape == (4, rows, layer.w13_packed.shape[1] * 64, SIZES.hidden, 2)
    first, second, result = kernel_experts.workspace_shapes(*shape[1:], 4, 4, meta, layer.activation)
    out = torch.full(result, 7.0).bfloat16()
    kernel_experts.apply(
        output=out,
        hidden_states=x,
        w1=layer.w13_packed,
        w2=layer.w2_packed,
        topk_weights=torch.ones((8, 2)),
        topk_ids=ids,
        activation=layer.activation,
        global_num_experts=4,
        expert_map=None,
        a1q_scale=scale,
        a2_scale=None,
        workspace13=torch.empty(first).bfloat16(),
        workspace2=torch.empty(second).bfloat16(),
        expert_tokens_meta=meta,
        apply_router_weight_on_input=False,
    )
    return out


@pytest.mark.parametrize("case", CASES)
def test_batched_experts_against_float64(backend, case):
    backend("deepep_low_latency")
    layer, (x, counts) = ready(case), batch()
    out = run(layer, x, None, counts)
    ones = torch.ones(MOST, 1)
    for e, count in enumerate(counts.tolist()):
        assert (out[e, count:] == 7.0).all()
        if count:
            ids = torch.full((count, 1), e, dtype=torch.int32)
            expected = oracle(layer, experts_of(case), x[e, :count], ones[:count], ids)
            assert relative_error(out[e, :count], expected) < 4e-3


@pytest.mark.parametrize("rows", [48, 46])
def test_fp8_tokens_in_either_scale_layout_or_bf16(backend, rows):
    """DeepEP's scales lie with an expert's rows together in memory, vLLM's own quantisation has them row by row."""
    backend("deepep_low_latency")
    layer, (x, counts) = ready("w4a8-bias"), batch(rows=rows)
    from_bf16 = run(layer, x, None, counts, rows)
    quantised, scales = quantize_activations(x.nan_to_num().view(-1, SIZES.hidden))
    quantised, scales = quantised.view(x.shape).to(torch.float8_e4m3fn), scales.view(*x.shape[:2], -1)
    m_major = scales_m_major((4, rows), SIZES.hidden, "cpu").copy_(scales)
    assert m_major.stride(1) == 1
    for given in (scales, m_major):
        assert torch.equal(run(layer, quantised, given, counts, rows), from_bf16)


def test_counts_of_other_ranks_experts_are_left_out(backend):
    backend("deepep_low_latency")
    layer, (x, counts) = ready("mxfp4"), batch()
    more = torch.cat([counts, torch.full((4,), 1000, dtype=torch.int32)])
    assert torch.equal(run(layer, x, None, more), run(layer, x, None, counts))


@pytest.mark.parametrize("name", compat.MODULAR_BACKENDS)
def test_kernel_path_takes_scratch_from_vllms_workspace_and_tiles_by_all_ranks_tokens(monkeypatch, backend, name):
    from types import SimpleNamespace

    import vllm_humming.moe.experts as experts_module
    from vllm_humming.moe import schedule

    backend(name)
    layer, selected, passed = ready("w4a8"), [], []
    layer.quant_method.experts.backend = "kernel"
    monkeypatch.setattr(schedule, "select", lambda *shape: selected.append(shape) or (3, 4))
    ops = torch.ops.vllm_humming
    fake_ops = SimpleNamespace(
        moe=lambda *args: passed.append(args) or ops.moe(*args),
        moe_batched=lambda *args: passed.append(args) or ops.moe_batched(*args),
        moe_workspace_bytes=lambda *shape: sum(shape),
        moe_batched_workspace_bytes=lambda *shape: sum(shape) + 1,
    )
    monkeypatch.setattr(experts_module, "torch", SimpleNamespace(**vars(torch) | {"ops": SimpleNamespace()}))
    monkeypatch.setattr(experts_module.torch.ops, "vllm_humming", fake_ops, raising=False)
    x, weights, ids = routing(9, SIZES)
    y = apply(layer, x, weights, ids)
    assert relative_error(y, oracle(layer, experts_of("w4a8"), x, weights, ids)) < 8e-3
    assert selected == [(9, 2, 4, 256, 256, True, 4, "w4a8")]
    (arguments,) = passed
    workspace = next(a for a in arguments if isinstance(a, torch.Tensor) and a.dtype == torch.uint8 and a.dim() == 1)
    batched = name in compat.BATCHED_BACKENDS
    wanted = MOST + 4 + 256 + 256 + 2 + 1 if batched else 9 + 2 + 4 + 256 + 256 + 2
    assert wanted <= workspace.numel() <= wanted + 1
    assert arguments[-2:] == (3, 4)
    assert arguments[0].dtype == (torch.float8_e4m3fn if batched else torch.bfloat16)


def test_hidden_sizes_that_a_backend_moves(monkeypatch, backend):
    """A backend for certain sizes only gets the next larger one: vLLM pads tokens with zeros and cuts the result."""
    sizes = Sizes(hidden=96, intermediate=160)
    asked = []

    def roundup(hidden, dtype, parallel):
        asked.append((hidden, dtype))
        return 256

    monkeypatch.setattr(all2all_utils, "maybe_roundup_layer_hidden_size", roundup)
    x, weights, ids = routing(9, sizes)
    for case in ("mxfp4-bias", "nvfp4", "w4a8-bias"):
        expected = apply(plain(monkeypatch, case, sizes), x, weights, ids)
        assert not asked
        backend("deepep_low_latency")
        layer = ready(case, sizes)
        assert asked.pop() == (96, torch.bfloat16)
        assert (layer.hidden_size, layer.w13_packed.shape[2], layer.w2_packed.shape[1]) == (256, 2, 4)
        y = apply(layer, torch.nn.functional.pad(x, (0, 160)), weights, ids)
        assert not y[:, 96:].any()
        assert relative_error(y[:, :96], expected) < 8e-3


def test_dummy_weights_of_padded_sizes(monkeypatch, backend):
    monkeypatch.setattr(all2all_utils, "maybe_roundup_layer_hidden_size", lambda *_: 256)
    backend("deepep_low_latency")
    with engine(load_format="dummy"):
        layer = build(CT_NVFP4, Sizes(hidden=96, intermediate=160))
        finish(layer)
    x, weights, ids = routing(9, Sizes(hidden=96))
    y = apply(layer, torch.nn.functional.pad(x, (0, 160)), weights, ids)
    assert y[:, :96].isfinite().all()
    assert y[:, :96].any()
    assert not y[:, 96:].any()


@pytest.mark.parametrize("case", ["mxfp4-bias", "nvfp4", "w4a8"])
def test_moved_experts_keep_batches_outputs(backend, case):
    """Expert load balancing moves parameters under a kernel that was made before."""
    backend("deepep_low_latency")
    with engine(additional={"humming": eplb.CASES[case][2]}, eplb=True):
        layer = eplb.build_case(case)
        eplb.load_by_mapping(layer, eplb.experts_of(case))
        finish(layer)
        x, weights, ids = routing(MOST, eplb.SIZES)
        first = apply(layer, x, weights, eplb.physical_ids(ids, eplb.BEFORE))
        assert relative_error(first, oracle(layer, eplb.experts_of(case), x, weights, ids)) < 8e-3
        eplb.rearrange(layer, eplb.BEFORE, eplb.AFTER)
        moved = apply(layer, x, weights, eplb.physical_ids(ids, eplb.AFTER))
    # The combine step adds experts in the order of their ids, in BF16.
    assert relative_error(moved, first) < 8e-3


def test_backends_need_bfloat16(backend):
    backend("deepep_low_latency")
    with engine(), pytest.raises(ValueError, match=r"mlp\.experts: .*'deepep_low_latency' moves bfloat16 .*float16"):
        build(CT_MXFP4, SIZES, dtype=torch.float16)


@pytest.mark.parametrize("name", compat.MODULAR_BACKENDS)
def test_backends_are_known_by_vllms_configuration(name):
    parallel = fake_moe(parallel={"use_all2all_kernels": True, "all2all_backend": name})
    assert method_for(parallel).uses_modular_kernel


def test_batched_backends_are_those_vllm_calls_so():
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig

    for name in compat.MODULAR_BACKENDS:
        sizes = dict.fromkeys(("tp_size", "pcp_size", "ep_size", "sp_size"), 1) | {"dp_size": 2}
        ranks = dict.fromkeys(("tp_rank", "pcp_rank", "dp_rank", "ep_rank"), 0)
        parallel = FusedMoEParallelConfig(**sizes, **ranks, use_ep=True, all2all_backend=name, enable_eplb=False)
        assert compat.all2all_backend(parallel) == name
        assert parallel.use_batched_activation_format == (name in compat.BATCHED_BACKENDS)


def test_missing_counts_are_an_error(backend):
    backend("deepep_low_latency")
    layer, (x, _) = ready("mxfp4"), batch()
    with pytest.raises(ValueError, match=r"mlp\.experts: batched tokens came without their counts"):
        run(layer, x, None, None)


def test_both_formats_are_vllms_experts():
    for experts in (modular.BatchedExperts, modular.StandardExperts):
        assert issubclass(experts, mk.FusedMoEExpertsModular)
        assert not experts.__abstractmethods__
