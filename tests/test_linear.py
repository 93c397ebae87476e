# SPDX-License-Identifier: Apache-2.0
"""FP4 linears on our kernels (option linears): real vLLM linears, loaded in vLLM's way, against float64."""

import contextlib
import copy

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
    engine,
    quant_config,
    relative_error,
)

from vllm_humming import compat
from vllm_humming.moe import packing
from vllm_humming.moe.packing import PackedProjection
from vllm_humming.moe.quantize import dequantize_mxfp4, dequantize_nvfp4
from vllm_humming.moe.weight_formats import MXFP4, NVFP4
from vllm_humming.quant_methods.tally import Tally

OURS = {"humming": {"linears": "humming"}}
PREFIX = "model.layers.0.mlp.shared_expert."
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
W4A4 = copy.deepcopy(CT_NVFP4)
W4A4["config_groups"]["group_0"]["input_activations"] = W4A4["config_groups"]["group_0"]["weights"] | {
    "dynamic": "local"
}
W4A8 = copy.deepcopy(CT_MXFP4)
W4A8["config_groups"]["group_0"]["input_activations"] = {
    "num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "symmetric": True, "dynamic": True,
}  # fmt: skip
MIXED = MODELOPT_MIXED | {
    "quantized_layers": {
        f"{PREFIX}gate_proj": {"quant_algo": "NVFP4", "group_size": 16},
        f"{PREFIX}up_proj": {"quant_algo": "NVFP4", "group_size": 16},
        f"{PREFIX}down_proj": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        f"{PREFIX}other_proj": {"quant_algo": "FP8"},
    }
}
FORMATS = {
    "compressed-tensors MXFP4": (CT_MXFP4, MXFP4),
    "compressed-tensors NVFP4": (CT_NVFP4, NVFP4),
    "compressed-tensors NVFP4 W4A4": (W4A4, NVFP4),
    "ModelOpt": (MODELOPT, NVFP4),
    "ModelOpt old": (MODELOPT_OLD, NVFP4),
    "ModelOpt mixed": (MIXED, NVFP4),
    "Quark": (QUARK, MXFP4),
}


@contextlib.contextmanager
def tensor_parallel(rank, size):
    """vLLM's linears built and loaded here are those of one rank."""
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import linear

    with pytest.MonkeyPatch.context() as patch:
        for module in (parameter, linear):
            patch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
            patch.setattr(module, "get_tensor_model_parallel_world_size", lambda: size)
        yield


def build(kind, checkpoint, *sizes, name, dtype=torch.bfloat16, bias=False, options=OURS, load_format="auto", **kwargs):
    from vllm.model_executor.layers import linear

    with engine(additional=options, load_format=load_format):
        config = quant_config(checkpoint)
        config.packed_modules_mapping = FUSED
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return getattr(linear, kind)(*sizes, bias=bias, quant_config=config, prefix=PREFIX + name, **kwargs)
        finally:
            torch.set_default_dtype(default)


class Weights:
    """Random projections [rows, K] of one linear, by name; NVFP4 ones with global scales that differ fourfold.

    The globals have more bits than bfloat16 holds, and are the fp32 reciprocals of their own reciprocals.
    """

    def __init__(self, rows, k, fmt, *, bias=False, seed=0):
        generator = torch.Generator().manual_seed(seed)
        low, high = (0, 0x48) if fmt is NVFP4 else (118, 126)
        self.fmt, self.names = fmt, list(rows)
        self.codes, self.scales, self.globals, self.bias = {}, {}, {}, {}
        for index, (name, n) in enumerate(rows.items()):
            draw = {"generator": generator, "dtype": torch.uint8}
            self.codes[name] = torch.randint(0, 256, (n, k // 2), **draw)
            self.scales[name] = torch.randint(low, high, (n, k // fmt.group_k), **draw)
            self.globals[name] = torch.tensor(1.2345 * 2.0 ** (2 * index - 5)).reciprocal().reciprocal()
            assert torch.equal(self.globals[name].reciprocal().reciprocal(), self.globals[name])
            self.bias[name] = torch.randn(n, generator=generator).bfloat16() if bias else None

    def dense(self, name):
        if self.fmt is NVFP4:
            return dequantize_nvfp4(self.codes[name], self.scales[name], self.globals[name], torch.float64)
        return dequantize_mxfp4(self.codes[name], self.scales[name], torch.float64)

    def whole(self):
        return torch.cat([self.dense(name) for name in self.names])

    def whole_bias(self):
        return torch.cat([self.bias[name] for name in self.names]).double()

    def tensors(self, name, scheme):
        """(suffix, tensor) as the checkpoint has them; the scales of activations are never looked at."""
        factor = self.globals[name]
        of_kind = {
            "codes": self.codes[name],
            "scales": self.scales[name].view(torch.float8_e4m3fn) if self.fmt is NVFP4 else self.scales[name],
            "global": factor.reciprocal().view(1) if scheme.reciprocal_global else factor,
            "unused": torch.tensor(torch.nan),
            "bias": self.bias[name],
        }
        return [(suffix, of_kind[kind]) for suffix, kind in scheme.tensors if of_kind[kind] is not None]


def load_one(layer, suffix, tensor, shard):
    param = getattr(layer, suffix)
    param.weight_loader(param, tensor, *(() if shard is None else (shard,)))


def load(layer, weights, *, skip=(), change=None):
    """Hands every projection to the layer as vLLM's models do. skip and change: by 'projection.suffix'."""
    for index, name in enumerate(weights.names):
        shard = None if len(weights.names) == 1 else name[0] if name in FUSED["qkv_proj"] else index
        for suffix, tensor in weights.tensors(name, layer.quant_method.scheme):
            if f"{name}.{suffix}" not in skip:
                load_one(layer, suffix, (change or {}).get(f"{name}.{suffix}", lambda t: t)(tensor), shard)


def finish(layer):
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def merged(checkpoint, weights, k=96, **kwargs):
    """A loaded gate_up_proj."""
    layer = build("MergedColumnParallelLinear", checkpoint, k, [120, 120], name="gate_up_proj", **kwargs)
    load(layer, weights)
    return finish(layer)


def unpacked(layer):
    """float64 weights [N, K] of this rank."""
    method = layer.quant_method
    packed = PackedProjection(layer.weight_packed, layer.row_scale, None, method.weight_format)
    weight, _ = packing.unpack_expert(
        packed,
        0,
        dtype=method._dtype,
        k=layer.input_size_per_partition,
        out_features=layer.output_size_per_partition,
        gated=False,
        out_dtype=torch.float64,
    )
    return weight


def run(layer, x):
    out = layer(x)
    return out[0] if isinstance(out, tuple) else out


GATE_UP = {"gate_proj": 120, "up_proj": 120}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_merged_columns_keep_their_own_global_scales(name, dtype):
    checkpoint, fmt = FORMATS[name]
    weights = Weights(GATE_UP, 96, fmt)
    layer = merged(checkpoint, weights, dtype=dtype)
    assert torch.equal(unpacked(layer), weights.whole())
    x = torch.randn(7, 96).to(dtype)
    y = run(layer, x)
    assert y.dtype == dtype
    assert relative_error(y, x.double() @ weights.whole().T) < 4e-3
    if fmt is NVFP4:  # one global scale for both would be far off
        weights.globals["up_proj"] = weights.globals["gate_proj"]
        assert relative_error(y, x.double() @ weights.whole().T) > 0.1


@pytest.mark.parametrize("name", FORMATS)
def test_row_parallel(name):
    checkpoint, fmt = FORMATS[name]
    weights = Weights({"down_proj": 72}, 160, fmt)
    layer = build("RowParallelLinear", checkpoint, 160, 72, name="down_proj")
    load(layer, weights)
    finish(layer)
    assert torch.equal(unpacked(layer), weights.whole())
    x = torch.randn(5, 160).bfloat16()
    assert relative_error(run(layer, x), x.double() @ weights.whole().T) < 4e-3


@pytest.mark.parametrize("fmt", [MXFP4, NVFP4], ids=["mxfp4", "nvfp4"])
def test_qkv_with_bias_and_any_leading_dimensions(fmt):
    checkpoint = CT_MXFP4 if fmt is MXFP4 else W4A4
    weights = Weights({"q_proj": 64, "k_proj": 32, "v_proj": 32}, 64, fmt, bias=True)
    layer = build("QKVParallelLinear", checkpoint, 64, 16, 4, 2, name="qkv_proj", bias=True)
    load(layer, weights)
    finish(layer)
    assert torch.equal(unpacked(layer), weights.whole())
    wide = torch.randn(2, 3, 80).bfloat16()
    for x in (wide[..., :64], wide[0, 0, :64], wide[:, :0, :64]):  # the first is not contiguous
        y = run(layer, x)
        assert y.shape == (*x.shape[:-1], 128)
        assert y.is_contiguous()
        if y.numel():
            assert relative_error(y, x.double() @ weights.whole().T + weights.whole_bias()) < 4e-3


def test_bias_is_added_where_vllm_asks_for_it():
    """Ranks other than the first pass none, and a layer that returns its bias does so, too."""
    weights = Weights({"down_proj": 72}, 96, MXFP4, bias=True)
    layer = build("RowParallelLinear", CT_MXFP4, 96, 72, name="down_proj", bias=True)
    load(layer, weights)
    finish(layer)
    x = torch.randn(5, 96).bfloat16()
    product = x.double() @ weights.whole().T
    apply = layer.quant_method.apply
    assert relative_error(apply(layer, x, None), product) < 4e-3
    assert relative_error(apply(layer, x, layer.bias), product + weights.whole_bias()) < 4e-3
    assert torch.equal(apply(layer, x, layer.bias.clone()), apply(layer, x, layer.bias))


@pytest.mark.parametrize(("rows", "k"), [(1, 32), (8, 416), (100, 96), (136, 288)])
def test_sizes_of_no_tile_multiple(rows, k):
    for fmt, checkpoint in ((MXFP4, CT_MXFP4), (NVFP4, CT_NVFP4)):
        width = k if fmt is MXFP4 else k - 16
        weights = Weights({"down_proj": rows}, width, fmt)
        layer = build("ReplicatedLinear", checkpoint, width, rows, name="down_proj")
        load(layer, weights)
        finish(layer)
        x = torch.randn(3, width).bfloat16()
        y = run(layer, x)
        assert y.shape == (3, rows)
        assert y.is_contiguous()
        assert relative_error(y, x.double() @ weights.whole().T) < 6e-3


def test_projections_fused_in_the_checkpoint():
    """Phi-3 style: one tensor over gate and up, or q, k and v, with one global scale."""
    weights = Weights({"gate_up_proj": 240}, 96, NVFP4)
    layer = build("MergedColumnParallelLinear", MODELOPT, 96, [160, 80], name="gate_up_proj")
    load(layer, weights)
    assert torch.equal(unpacked(finish(layer)), weights.whole())
    weights = Weights({"qkv_proj": 128}, 64, NVFP4)
    layer = build("QKVParallelLinear", MODELOPT, 64, 16, 4, 2, name="qkv_proj")
    load(layer, weights)
    assert torch.equal(unpacked(finish(layer)), weights.whole())


def test_some_shards_in_one_tensor():
    """Qwen3-Next style: the first two of three outputs come together."""
    weights = Weights({"a": 48, "b": 32}, 64, NVFP4)
    layer = build("MergedColumnParallelLinear", MODELOPT, 64, [16, 32, 32], name="in_proj")
    for name, shard in (("a", (0, 1)), ("b", 2)):
        for suffix, tensor in weights.tensors(name, layer.quant_method.scheme):
            load_one(layer, suffix, tensor, shard)
    assert torch.equal(unpacked(finish(layer)), weights.whole())


@pytest.mark.parametrize("codes", [torch.uint8, torch.int8])
@pytest.mark.parametrize("scales", [torch.uint8, torch.float8_e8m0fnu, torch.float32])
def test_dtypes_of_codes_and_scales(codes, scales):
    weights = Weights({"down_proj": 64}, 96, MXFP4)
    layer = build("ReplicatedLinear", CT_MXFP4, 96, 64, name="down_proj")
    raw = weights.scales["down_proj"].view(torch.float8_e8m0fnu)
    stored = {torch.uint8: raw.view(torch.uint8), torch.float8_e8m0fnu: raw, torch.float32: raw.float()}[scales]
    change = {"down_proj.weight_packed": lambda t: t.view(codes), "down_proj.weight_scale": lambda t: stored}
    load(layer, weights, change=change)
    assert torch.equal(unpacked(finish(layer)), weights.whole())


# Shards of tensor parallelism


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["compressed-tensors MXFP4", "compressed-tensors NVFP4 W4A4", "ModelOpt", "Quark"])
def test_tensor_parallel_shares(name, size):
    checkpoint, fmt = FORMATS[name]
    k = 4 * fmt.group_k
    gate_up = Weights({"gate_proj": 48, "up_proj": 32}, k, fmt)
    down = Weights({"down_proj": 40}, k, fmt, bias=True)
    qkv = Weights({"q_proj": 128, "k_proj": 32, "v_proj": 32}, k, fmt, bias=True)
    x = torch.randn(5, k).bfloat16()
    total = torch.zeros(5, 40, dtype=torch.float64)
    for rank in range(size):
        with tensor_parallel(rank, size):
            columns = build("MergedColumnParallelLinear", checkpoint, k, [48, 32], name="gate_up_proj")
            load(columns, gate_up)
            shares = [gate_up.dense(part).chunk(size)[rank] for part in gate_up.names]
            assert torch.equal(unpacked(finish(columns)), torch.cat(shares))

            rows = build("RowParallelLinear", checkpoint, k, 40, name="down_proj", bias=True, reduce_results=True)
            load(rows, down)
            assert torch.equal(unpacked(finish(rows)), down.whole().chunk(size, 1)[rank])
            total += rows.quant_method.apply(rows, x.chunk(size, 1)[rank].contiguous(), None).double()

            attention = build("QKVParallelLinear", checkpoint, k, 16, 8, 2, name="qkv_proj", bias=True)
            load(attention, qkv)
            finish(attention)
            kv = 2 if size >= 2 else 1  # two heads of 16: with four ranks, two ranks have the same one
            own = rank * kv // size
            parts = [
                qkv.dense("q_proj").chunk(size)[rank],
                qkv.dense("k_proj").chunk(kv)[own],
                qkv.dense("v_proj").chunk(kv)[own],
            ]
            assert torch.equal(unpacked(attention), torch.cat(parts))
            y = run(attention, x)
            biases = [qkv.bias["q_proj"].chunk(size)[rank]]
            biases += [qkv.bias[part].chunk(kv)[own] for part in ("k_proj", "v_proj")]
            assert relative_error(y, x.double() @ torch.cat(parts).T + torch.cat(biases).double()) < 4e-3
    assert relative_error(total, x.double() @ down.whole().T) < 6e-3


def test_shares_that_cut_a_scale_group_are_refused_by_name():
    with (
        tensor_parallel(0, 2),
        pytest.raises(
            ValueError,
            match=r"shared_expert\.down_proj: 2 ranks have 48 of 96 .* cuts a scale group of 32; use a "
            r"--tensor-parallel-size that divides 3",
        ),
    ):
        build("RowParallelLinear", CT_MXFP4, 96, 64, name="down_proj")
    with tensor_parallel(0, 2):  # NVFP4 has shorter groups
        build("RowParallelLinear", CT_NVFP4, 96, 64, name="down_proj")


# Refusals


def half(t):
    return t.half()


def poisoned(t):
    return torch.full((t.numel(),), 0xFF, dtype=torch.uint8).view(t.dtype).view(t.shape)


DAMAGES = {
    "up_proj.weight": {
        "truncated rows": (lambda t: t[:-1], r"up_proj.weight must have shape \(120, 48\), found \(119, 48\)"),
        "too many rows": (lambda t: torch.cat([t, t]), r"must have shape \(120, 48\), found \(240, 48\)"),
        "truncated K": (lambda t: t[:, :-8], r"must have shape \(120, 48\), found \(120, 40\)"),
        "dtype": (lambda t: t.bfloat16(), "must be torch.uint8 or torch.int8, found torch.bfloat16"),
    },
    "up_proj.weight_scale": {
        "dtype": (half, "up_proj.weight_scale must be .*float8_e4m3fn.*found torch.float16"),
        "nan": (poisoned, "up_proj.weight_scale scale of row 0, group 0 is nan"),
        "shape": (lambda t: t[:, :-1], r"must have shape \(120, 6\), found \(120, 5\)"),
    },
    "up_proj.weight_scale_2": {
        "zero": (torch.zeros_like, "up_proj.weight_scale_2 global scale must be positive and finite, found 0.0"),
        "nan": (lambda t: t * torch.nan, "must be positive and finite, found nan"),
        "two": (lambda t: t.repeat(2), r"up_proj.weight_scale_2 must be one value, found shape \(2,\)"),
        "dtype": (lambda t: t.double(), "must be .*torch.float32, found torch.float64"),
    },
    "up_proj.bias": {
        "nan": (lambda t: t * torch.nan, "up_proj.bias holds NaN or infinity"),
        "shape": (lambda t: t[1:], r"up_proj.bias must have shape \(120,\), found \(119,\)"),
    },
}


@pytest.mark.parametrize(("tensor", "damage"), [(t, d) for t, damages in DAMAGES.items() for d in damages])
def test_damaged_tensors_are_refused(tensor, damage):
    change, message = DAMAGES[tensor][damage]
    layer = build("MergedColumnParallelLinear", MODELOPT, 96, [120, 120], name="gate_up_proj", bias=True)
    with pytest.raises(ValueError, match=rf"shared_expert\.gate_up_proj: .*{message}"):
        load(layer, Weights(GATE_UP, 96, NVFP4, bias=True), change={tensor: change})


@pytest.mark.parametrize("shard", [2, -1, "q", (0, 5)])
def test_shards_that_the_linear_does_not_have(shard):
    layer = build("MergedColumnParallelLinear", MODELOPT, 96, [120, 120], name="gate_up_proj")
    with pytest.raises(ValueError, match=r"shared_expert\.gate_up_proj: .*weight .*MergedColumnParallelLinear"):
        load_one(layer, "weight", torch.zeros(120, 48, dtype=torch.uint8), shard)
    layer = build("QKVParallelLinear", MODELOPT, 96, 32, 4, 2, name="qkv_proj")
    with pytest.raises(ValueError, match=r"qkv_proj: .*weight .*QKVParallelLinear"):
        load_one(layer, "weight", torch.zeros(128, 48, dtype=torch.uint8), 0)


@pytest.mark.parametrize("tensor", DAMAGES)
def test_missing_tensors_are_refused(tensor):
    layer = build("MergedColumnParallelLinear", MODELOPT, 96, [120, 120], name="gate_up_proj", bias=True)
    load(layer, Weights(GATE_UP, 96, NVFP4, bias=True), skip=(tensor,))
    with pytest.raises(
        ValueError,
        match=rf"shared_expert\.gate_up_proj: the checkpoint lacks 1 tensor of this linear: {tensor}\. Check",
    ):
        finish(layer)


def test_a_linear_that_nothing_was_loaded_into_is_refused():
    layer = build("RowParallelLinear", CT_NVFP4, 96, 64, name="down_proj")
    with pytest.raises(ValueError, match="lacks 3 tensors of this linear: weight_packed, weight_scale, weight_global_"):
        finish(layer)


def test_scales_beyond_float16_are_refused():
    weights = Weights({"down_proj": 64}, 96, MXFP4)
    weights.scales["down_proj"][5] = torch.tensor([100, 127, 127], dtype=torch.uint8)
    weights.codes["down_proj"][5] = 0x22
    layer = build("RowParallelLinear", CT_MXFP4, 96, 64, name="down_proj", dtype=torch.float16)
    load(layer, weights)
    with pytest.raises(ValueError, match=r"down_proj: weight_packed row 5: scale exponents .*--dtype bfloat16"):
        finish(layer)


def test_sizes_and_dtypes_that_there_are_no_kernels_for():
    with pytest.raises(ValueError, match=r"down_proj: MXFP4 needs the input size to be a multiple of 32, found 48"):
        build("ReplicatedLinear", CT_MXFP4, 48, 64, name="down_proj")
    with pytest.raises(ValueError, match=r"down_proj: activations must be bfloat16 or float16, found torch.float32"):
        build("ReplicatedLinear", CT_MXFP4, 64, 64, name="down_proj", dtype=torch.float32)
    layer = merged(CT_MXFP4, Weights(GATE_UP, 96, MXFP4))
    with pytest.raises(ValueError, match=r"gate_up_proj: weights packed for torch.bfloat16 activations, found x of"):
        run(layer, torch.randn(2, 96).half())
    for k in (64, 128):  # the packed weights have zeros up to 128
        with pytest.raises(ValueError, match=rf"gate_up_proj: x must have 96 channels, found shape \(2, {k}\)"):
            run(layer, torch.randn(2, k).bfloat16())


def test_packed_linears_are_not_reloaded():
    weights = Weights(GATE_UP, 96, MXFP4, bias=True)
    layer = build("MergedColumnParallelLinear", CT_MXFP4, 96, [120, 120], name="gate_up_proj", bias=True)
    codes = layer.weight_packed
    load(layer, weights)
    finish(layer)
    for param in (codes, layer.bias):
        with pytest.raises(RuntimeError, match="gate_up_proj: .* came after the weights were packed"):
            param.weight_loader(param, weights.codes["up_proj"], 1)
    finish(layer)  # vLLM may ask again
    assert {name for name, _ in layer.named_parameters()} == {"weight_packed", "row_scale", "packed_bias", "bias"}


# Which method a linear gets


def method_for(checkpoint, name, options=OURS, kind="ReplicatedLinear"):
    layer = build(kind, checkpoint, 128, 64, name=name, options=options)
    return type(layer.quant_method)


@pytest.fixture
def vllms(monkeypatch):
    """vLLM's own method of every format is a stand-in."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    class VllmMethod(UnquantizedLinearMethod):
        pass

    for checkpoint in (CT_MXFP4, MODELOPT, MODELOPT_MIXED, QUARK, GPT_OSS, DEEPSEEK):
        base = type(quant_config(checkpoint)).__bases__[1]
        monkeypatch.setattr(base, "get_quant_method", lambda self, layer, prefix: VllmMethod())
    return VllmMethod


def test_vllm_runs_linears_by_default(vllms):
    for checkpoint, _ in FORMATS.values():
        assert method_for(checkpoint, "down_proj", {}) is vllms
        assert method_for(checkpoint, "down_proj", {"humming": {"linears": "vllm"}}) is vllms
        assert method_for(checkpoint, "down_proj").__name__ == "HummingLinearMethod"


def ct(**group):
    config = copy.deepcopy(CT_MXFP4)
    config["config_groups"]["group_0"].update(group)
    return config


EIGHT_BITS = CT_MXFP4["config_groups"]["group_0"]["weights"] | {"num_bits": 8}
OTHERS = {
    "ignored": CT_MXFP4 | {"ignore": [f"{PREFIX}down_proj"]},
    "another target": ct(targets=["re:.*experts.*"]),
    "FP8 activations": W4A8,
    "ModelOpt excluded": MODELOPT | {"ignore": ["*down_proj"]},
    "ModelOpt mixed FP8": MIXED | {"quantized_layers": MIXED["quantized_layers"] | {
        f"{PREFIX}down_proj": {"quant_algo": "FP8"}}},
    "ModelOpt mixed unknown": MODELOPT_MIXED,
    "Quark excluded": QUARK | {"exclude": [f"{PREFIX}down_proj"]},
    "Quark FP8": QUARK | {"layer_quant_config": {"*down_proj": {"weight": {"dtype": "fp8_e4m3"}}}},
    "gpt-oss": GPT_OSS,
    "DeepSeek-V4": DEEPSEEK,
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_fp4_linear_stays_vllms(name, vllms):
    assert method_for(OTHERS[name], "down_proj") is vllms


HEADS = {
    "compressed-tensors": CT_NVFP4 | {"ignore": []},
    "ModelOpt": MODELOPT | {"ignore": []},
    "ModelOpt mixed": MODELOPT_MIXED | {"ignore": [], "quantized_layers": {"lm_head": {"quant_algo": "NVFP4"}}},
}
HEADS["compressed-tensors"]["config_groups"] = {
    "group_0": CT_NVFP4["config_groups"]["group_0"] | {"targets": ["Linear", "re:.*lm_head"]}
}


@pytest.mark.parametrize("name", HEADS)
def test_a_quantised_output_layer_is_refused_by_name_without_a_gpu(name):
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    with (
        engine(additional=OURS),
        pytest.raises(
            ValueError, match=r"(?s)^lm_head: vLLM itself runs this ParallelLMHead of a .* leaves it unquantised$"
        ),
    ):
        ParallelLMHead(256, 128, params_dtype=torch.bfloat16, quant_config=quant_config(HEADS[name]), prefix="lm_head")


@pytest.mark.parametrize("name", ["compressed-tensors NVFP4", "ModelOpt", "ModelOpt mixed"])
def test_vllms_fp4_linears_are_refused_by_name_without_a_gpu(name):
    with pytest.raises(
        ValueError, match=r"(?s)^model\..*down_proj: vLLM itself runs .*option linears set to 'humming'"
    ):
        build("ReplicatedLinear", FORMATS[name][0], 128, 64, name="down_proj", options={})


def test_vision_towers_of_older_modelopt_checkpoints_stay_vllms(vllms):
    assert method_for(MODELOPT, "vision_tower.down_proj") is vllms


def test_one_group_of_several(vllms):
    """4-bit linears next to 8-bit ones: each by its own group."""
    config = copy.deepcopy(CT_MXFP4)
    group = config["config_groups"]["group_0"]
    config["config_groups"]["group_1"] = group | {
        "targets": ["re:.*down_proj"], "weights": EIGHT_BITS, "format": "mxfp8-quantized",
    }  # fmt: skip
    group["targets"] = ["re:.*other_proj"]
    assert method_for(config, "down_proj") is vllms
    assert method_for(config, "other_proj").__name__ == "HummingLinearMethod"


# The rest of vLLM


def test_vllm_gives_the_layer_its_second_kind_of_loader():
    from vllm.model_executor.layers.linear import WEIGHT_LOADER_V2_SUPPORTED

    from vllm_humming.quant_methods.linear import HummingLinearMethod

    assert HummingLinearMethod.__name__ in WEIGHT_LOADER_V2_SUPPORTED


def test_mla_reads_the_weights_back():
    from vllm.model_executor.layers.quantization.utils.quant_utils import get_and_maybe_dequant_weights

    weights = Weights(GATE_UP, 96, MXFP4)
    layer = merged(CT_MXFP4, weights)
    assert torch.equal(get_and_maybe_dequant_weights(layer, torch.bfloat16), weights.whole().bfloat16())


def test_op_under_the_op_checks():
    layer = merged(CT_MXFP4, Weights(GATE_UP, 96, MXFP4))
    args = (torch.randn(2, 3, 96).bfloat16(), layer.weight_packed.data, layer.row_scale.data, None, 240, 0, False)
    torch.library.opcheck(torch.ops.vllm_humming.linear.default, args)


def test_compiled_for_any_number_of_rows():
    """The tile depends on the number of rows, and a compiled model must not be tied to the one it was compiled with."""
    weights = Weights(GATE_UP, 96, NVFP4, bias=True)
    layer = build("MergedColumnParallelLinear", CT_NVFP4, 96, [120, 120], name="gate_up_proj", bias=True)
    load(layer, weights)
    finish(layer)
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(lambda x: layer.quant_method.apply(layer, x, layer.bias), backend=counter, dynamic=True)
    for rows in (3, 64, 700):
        x = torch.randn(rows, 96).bfloat16()
        assert torch.equal(compiled(x), layer.quant_method.apply(layer, x, layer.bias))
    assert counter.frame_count == 1


@pytest.mark.parametrize("checkpoint", [CT_MXFP4, MODELOPT])
def test_dummy_weights(checkpoint):
    layer = build(
        "MergedColumnParallelLinear", checkpoint, 96, [120, 120], name="gate_up_proj", bias=True, load_format="dummy"
    )
    finish(layer)
    y = run(layer, torch.randn(16, 96).bfloat16())
    assert torch.isfinite(y).all()
    assert y.any()


def test_summary_line(monkeypatch):
    from vllm_humming.quant_methods import linear

    lines = []
    monkeypatch.setattr(linear.logger, "info", lambda text, *args: lines.append(text % args))
    monkeypatch.setattr(linear, "_TALLY", Tally("linear", "weights"))
    layers = [build("ReplicatedLinear", CT_MXFP4, 64, 64, name=f"{n}.down_proj") for n in range(2)]
    for layer in layers:
        assert lines == []
        load(layer, Weights({"down_proj": 64}, 64, MXFP4))
        finish(layer)
    (line,) = lines
    assert line.endswith(": 2 linears run through vllm_humming (MXFP4 weights, reference path)")


def test_reference_on_a_gpu_takes_the_same_way():
    """The backend 'reference' computes the same without the operator of the kernels."""
    weights = Weights(GATE_UP, 96, MXFP4)
    layer = merged(CT_MXFP4, weights)
    x = torch.randn(3, 96).bfloat16()
    args = (layer.weight_packed, layer.row_scale, None, 240, 0)
    found = [torch.ops.vllm_humming.linear(x, *args, reference) for reference in (False, True)]
    assert torch.equal(*found)


def test_rows_of_the_checkpoints_tensors():
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    qkv = build("QKVParallelLinear", CT_MXFP4, 64, 16, 4, 2, name="qkv_proj")
    assert [compat.linear_checkpoint_rows(qkv, shard) for shard in ("q", "k", "v", None)] == [64, 32, 32, 128]
    gate_up = build("MergedColumnParallelLinear", CT_MXFP4, 64, [48, 32, 16], name="gate_up_proj")
    assert [compat.linear_checkpoint_rows(gate_up, shard) for shard in (1, (0, 1), None)] == [32, 80, 96]

    class WithRulesOfItsOwn(MergedColumnParallelLinear):
        def weight_loader_v2(self, *args):
            pass

    gate_up.__class__ = WithRulesOfItsOwn
    assert compat.linear_checkpoint_rows(gate_up, 1) is None
