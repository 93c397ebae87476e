# SPDX-License-Identifier: Apache-2.0
"""Which config and which methods a checkpoint gets under `--quantization humming`."""

import copy
import pickle
import subprocess
import sys

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
    Sizes,
    build,
    engine,
    quant_config,
)

import vllm_humming
from vllm_humming import compat
from vllm_humming.quant_methods import config as config_module
from vllm_humming.quant_methods.config import HummingConfig

SIZES = Sizes()
BASES = {
    "compressed-tensors": CT_MXFP4,
    "gpt_oss_mxfp4": GPT_OSS,
    "modelopt_fp4": MODELOPT,
    "modelopt_mixed": MODELOPT_MIXED,
    "quark": QUARK,
    "deepseek_v4_fp8": DEEPSEEK,
}
CHECKPOINTS = (*BASES.values(), CT_NVFP4, MODELOPT_OLD)


def _ct(**changes):
    config = copy.deepcopy(CT_MXFP4)
    config["config_groups"]["group_0"]["weights"].update(changes.pop("weights", {}))
    if "format" in changes:
        config["config_groups"]["group_0"]["format"] = changes["format"]
    return config | changes


@pytest.mark.parametrize("base", BASES)
def test_config_is_a_shadow_of_vllms_own(base):
    config = quant_config(BASES[base])
    assert isinstance(config, compat.base_config_class(base))
    assert type(config).__mro__[1] is config_module.ShadowMixin
    assert config.get_name() == base
    assert config.get_supported_act_dtypes() == [torch.bfloat16, torch.float16]
    assert type(quant_config(BASES[base])) is type(config)


def test_unquantised_checkpoint_gets_the_online_config():
    config = quant_config(None)
    assert type(config) is HummingConfig
    assert config.get_name() == "humming"
    assert HummingConfig.get_config_filenames() == []
    with pytest.raises(ValueError, match="unquantised gpt-oss"):
        config.maybe_update_config("model", hf_config=type("Config", (), {"model_type": "gpt_oss"})())


@pytest.mark.parametrize(
    ("checkpoint", "named"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "quant_method='fp8'"),
        ({"quant_method": "awq", "bits": 4}, "quant_method='awq'"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "quant_method='modelopt' quant_algo='FP8'"),
        (
            {"quant_method": "modelopt_fp4", "quantization": {"quant_algo": "NVFP4_AWQ"}},
            "quant_method='modelopt_fp4' quant_algo='NVFP4_AWQ'",
        ),
        (QUARK | {"global_quant_config": {"weight": {"dtype": "int4"}}}, "quant_method='quark'"),
        (_ct(format="nvfp4-pack-quantized"), "format='nvfp4-pack-quantized'.*group 32"),
        (_ct(weights={"group_size": 16}), "format='mxfp4-pack-quantized'.*group 16"),
        (
            _ct(format="pack-quantized", weights={"type": "int", "group_size": 128}),
            "format='pack-quantized'.*4-bit int",
        ),
        ({"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}, "format='mxfp4-pack-quantized'"),
        ({}, "quant_method=None"),
    ],
)
def test_unknown_formats_are_refused_by_name(checkpoint, named):
    with pytest.raises(ValueError, match=named) as error:
        quant_config(checkpoint)
    assert (
        "Supported: compressed-tensors mxfp4-pack-quantized and nvfp4-pack-quantized; ModelOpt NVFP4; ModelOpt mixed "
        "precision; Quark MXFP4; gpt-oss mxfp4; DeepSeek-V4 FP8 with FP4 experts; unquantised"
    ) in str(error.value)


def test_override_only_when_asked_for():
    override = HummingConfig.override_quantization_method
    assert override({"quant_method": "mxfp4"}, "humming", hf_config=None) == "humming"
    assert override({"quant_method": "mxfp4"}, None) is None
    assert override({"quant_method": "mxfp4"}, "mxfp4") is None


def test_configs_pickle_into_a_fresh_process(tmp_path):
    configs = [quant_config(checkpoint) for checkpoint in (*CHECKPOINTS, None)]
    file = tmp_path / "configs.pkl"
    file.write_bytes(pickle.dumps(configs))
    code = (
        f"import pickle\nfor c in pickle.load(open({str(file)!r}, 'rb')):\n"
        " print(type(c).__module__, type(c).__qualname__, c.get_name())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    expected = [f"{type(c).__module__} {type(c).__qualname__} {c.get_name()}" for c in configs]
    assert done.stdout.splitlines()[-len(expected) :] == expected


def test_no_other_name_is_made_up():
    with pytest.raises(AttributeError):
        _ = config_module.HummingShadow_unknown


@pytest.mark.parametrize("checkpoint", [CT_MXFP4, GPT_OSS, None])
def test_experts_get_our_method_and_linears_keep_vllms(checkpoint):
    from vllm.model_executor.layers.linear import ReplicatedLinear

    config = _ct(ignore=["lm_head", "re:.*self_attn.*"]) if checkpoint is CT_MXFP4 else checkpoint
    with engine():
        gpt_oss = {"has_bias": True, "activation": "swigluoai"} if checkpoint is GPT_OSS else {}
        layer = build(config, SIZES, **gpt_oss)
        assert type(layer.quant_method).__name__ == "HummingMoEMethod"
        assert layer.quant_method.moe_kernel is None
        assert not layer.quant_method.is_monolithic
        linear = ReplicatedLinear(
            64, 64, bias=False, quant_config=quant_config(config), prefix="model.layers.0.self_attn.o_proj"
        )
        assert type(linear.quant_method).__name__ == "UnquantizedLinearMethod"


def test_quantised_linears_and_kv_cache_stay_with_vllm(monkeypatch):
    base = compat.base_config_class("compressed-tensors")
    asked = []
    monkeypatch.setattr(base, "get_quant_method", lambda self, layer, prefix: asked.append(prefix) or "vllm's")
    config = quant_config(CT_MXFP4)
    assert config.get_quant_method(torch.nn.Linear(2, 2), "model.layers.0.self_attn.qkv_proj") == "vllm's"
    assert config.get_quant_method(torch.nn.Identity(), "model.layers.0.self_attn.attn") == "vllm's"
    assert asked == ["model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.attn"]


def test_quantised_linear_without_a_gpu_is_a_clear_error():
    from vllm.model_executor.layers.linear import ReplicatedLinear

    config = quant_config(CT_MXFP4)
    with (
        engine(),
        pytest.raises(ValueError, match=r"self_attn\.o_proj: vLLM itself runs .* without a GPU: Failed to find"),
    ):
        ReplicatedLinear(64, 64, bias=False, quant_config=config, prefix="model.layers.0.self_attn.o_proj")


def test_ignored_experts_stay_with_vllm(monkeypatch):
    base = compat.base_config_class("compressed-tensors")
    config = quant_config(_ct(ignore=["re:.*experts.*"]))
    with engine():
        layer = build(CT_MXFP4, SIZES)
        monkeypatch.setattr(base, "get_quant_method", lambda self, layer, prefix: "vllm's")
        lines = []
        monkeypatch.setattr(config_module.logger, "info", lambda text, *args: lines.append(text % args))
        assert config.get_quant_method(layer, layer.layer_name) == "vllm's"
    assert lines == [
        "model.layers.0.mlp.experts: this checkpoint stores these experts not as FP4; vLLM's own method runs them"
    ]


@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=lambda checkpoint: checkpoint["quant_method"])
def test_experts_of_every_format_get_our_method(checkpoint):
    gpt_oss = {"has_bias": True, "activation": "swigluoai"} if checkpoint is GPT_OSS else {}
    with engine():
        layer = build(checkpoint, SIZES, **gpt_oss)
    nvfp4 = checkpoint in (CT_NVFP4, MODELOPT, MODELOPT_OLD, MODELOPT_MIXED)
    assert layer.quant_method.weight_format.name == ("nvfp4" if nvfp4 else "mxfp4")
    assert layer.quant_method.scheme.reciprocal_global == (checkpoint is CT_NVFP4)


@pytest.mark.parametrize(
    ("checkpoint", "excluded"),
    [
        (MODELOPT | {"ignore": ["*mlp.experts*"]}, "model.layers.0.mlp.experts"),
        (MODELOPT_OLD | {"quantization": MODELOPT_OLD["quantization"] | {"exclude_modules": ["model.layers.0*"]}},
         "model.layers.0.mlp.experts"),
        (MODELOPT_MIXED, "model.layers.2.mlp.experts"),  # FP8
        (MODELOPT_MIXED, "model.layers.3.mlp.experts"),  # excluded
        (MODELOPT_MIXED, "model.layers.4.mlp.experts"),  # not listed
        (QUARK | {"exclude": ["re:.*experts.*"]}, "model.layers.0.mlp.experts"),
        (DEEPSEEK | {"ignored_layers": ["model.layers.0.mlp.experts"]}, "model.layers.0.mlp.experts"),
    ],
)  # fmt: skip
def test_excluded_experts_of_every_format_stay_with_vllm(checkpoint, excluded, monkeypatch):
    config = quant_config(checkpoint)
    monkeypatch.setattr(
        compat.base_config_class(type(config).checkpoint_format.base),
        "get_quant_method",
        lambda self, layer, prefix: "vllm's",
    )
    with engine():
        layer = build(CT_MXFP4, SIZES)
        assert config.get_quant_method(layer, excluded) == "vllm's"
        if checkpoint is MODELOPT_MIXED:
            assert type(config.get_quant_method(layer, "model.layers.1.mlp.experts")).__name__ == "HummingMoEMethod"


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        (MODELOPT | {"group_size": 32}, "NVFP4 has groups of 16, found group_size 32"),
        (
            QUARK | {"layer_quant_config": {"*experts*": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}}},
            "loads Quark experts whose weight is .*'fp4'.*found .*'fp8_e4m3'",
        ),
    ],
)
def test_experts_stored_otherwise_are_refused_by_name(checkpoint, message):
    with engine(), pytest.raises(ValueError, match=rf"model\.layers\.0\.mlp\.experts: .*{message}"):
        build(checkpoint, SIZES)


def test_deepseek_fp8_experts_are_refused_by_name(monkeypatch):
    config = quant_config(DEEPSEEK)
    monkeypatch.setattr(type(config), "expert_dtype", "fp8")
    with engine():
        layer = build(CT_MXFP4, SIZES)
        with pytest.raises(ValueError, match=r"layers\.0\.mlp\.experts: .*expert_dtype 'fp4' .*found .*'fp8'"):
            config.get_quant_method(layer, layer.layer_name)


def test_experts_of_another_scheme_are_refused_by_name():
    config = _ct()
    config["config_groups"]["experts"] = copy.deepcopy(config["config_groups"]["group_0"])
    config["config_groups"]["experts"]["targets"] = ["re:.*experts.*"]
    config["config_groups"]["experts"]["format"] = "float-quantized"
    config["config_groups"]["experts"]["weights"].update(num_bits=8, strategy="channel", group_size=None)
    config["config_groups"]["group_0"]["targets"] = ["re:.*self_attn.*"]
    with engine(), pytest.raises(ValueError, match=r"model\.layers\.0.*found format 'float-quantized'.*'num_bits': 8"):
        build(config, SIZES)


# FP8 activations: by the option, or where the checkpoint says so

FP8_INPUT = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "symmetric": True, "dynamic": True}
QUARK_INPUT = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": True, "symmetric": True}


def _ct_with_input(base=CT_MXFP4, **changes):
    config = copy.deepcopy(base)
    config["config_groups"]["group_0"]["input_activations"] = FP8_INPUT | changes
    return config


def _quark_with_input(**changes):
    return QUARK | {"global_quant_config": QUARK["global_quant_config"] | {"input_tensors": QUARK_INPUT | changes}}


def _format(checkpoint, activation=None, online=None):
    """The name of the format that a checkpoint's experts are packed in under the options."""
    options = {"activation": activation, "online_format": online}
    gpt_oss = {"has_bias": True, "activation": "swigluoai"} if checkpoint is GPT_OSS else {}
    with engine(additional={"humming": {name: value for name, value in options.items() if value}}):
        method = build(checkpoint, SIZES, **gpt_oss).quant_method
    assert method.weight_dtype == method.scheme.weight_format.name  # what vLLM asks for is the checkpoint's
    return method.weight_format.name


@pytest.mark.parametrize("checkpoint", [CT_MXFP4, GPT_OSS, QUARK, DEEPSEEK, None])
def test_every_mxfp4_checkpoint_runs_with_fp8_activations(checkpoint):
    assert _format(checkpoint, "fp8") == "mxfp4_fp8"
    assert _format(checkpoint, "16bit") == _format(checkpoint) == "mxfp4"


@pytest.mark.parametrize(
    "checkpoint",
    [
        _ct_with_input(),
        _quark_with_input(),
        _quark_with_input(qscheme="per_group", group_size=128),
        QUARK | {"global_quant_config": QUARK["global_quant_config"] | {"input_tensors": [QUARK_INPUT]}},
    ],
)
def test_checkpoints_that_say_fp8_get_it(checkpoint):
    assert _format(checkpoint) == _format(checkpoint, "fp8") == "mxfp4_fp8"
    assert _format(checkpoint, "16bit") == "mxfp4"


@pytest.mark.parametrize(
    "checkpoint",
    [
        _ct_with_input(num_bits=4, group_size=32),
        _ct_with_input(type="int", strategy="token", group_size=None),
        _ct_with_input(dynamic=False, strategy="tensor", group_size=None),
        _quark_with_input(is_dynamic=False),
    ],
)
def test_activations_of_other_kinds_stay_16_bit(checkpoint):
    assert _format(checkpoint) == "mxfp4"
    assert _format(checkpoint, "fp8") == "mxfp4_fp8"


@pytest.mark.parametrize(
    ("checkpoint", "stated"),
    [
        (_ct_with_input(strategy="token", group_size=None), "num_bits 8, type float, strategy token, dynamic True"),
        (_ct_with_input(group_size=32), "num_bits 8, type float, strategy group, group_size 32, dynamic True"),
        (
            _quark_with_input(qscheme="per_group", group_size=32),
            "dtype fp8_e4m3, qscheme per_group, group_size 32, is_dynamic True",
        ),
    ],
)
def test_fp8_of_another_kind_is_refused_with_the_way_out(checkpoint, stated):
    with pytest.raises(
        ValueError, match=rf"^model\.layers\.0\.mlp\.experts: .*FP8 activations with {stated};"
    ) as error:
        _format(checkpoint)
    assert "Set the option activation to 'fp8' for these or to '16bit'" in str(error.value)
    assert _format(checkpoint, "fp8") == "mxfp4_fp8"
    assert _format(checkpoint, "16bit") == "mxfp4"


@pytest.mark.parametrize("checkpoint", [CT_NVFP4, MODELOPT, MODELOPT_OLD, MODELOPT_MIXED])
def test_nvfp4_weights_do_not_run_with_fp8_activations(checkpoint):
    message = r"^model\.layers\.0\.mlp\.experts: FP8 activations need MXFP4 weights, found NVFP4; .* to '16bit'$"
    with pytest.raises(ValueError, match=message):
        _format(checkpoint, "fp8")
    assert _format(checkpoint, "16bit") == "nvfp4"


def test_online_nvfp4_does_not_run_with_fp8_activations():
    with pytest.raises(ValueError, match="found NVFP4; .* to '16bit', or online_format to 'mxfp4'$"):
        _format(None, "fp8", "nvfp4")
    assert _format(None, "fp8", "mxfp4") == "mxfp4_fp8"
    assert _format(None, "auto", "nvfp4") == "nvfp4"


def test_the_log_says_what_became_of_the_checkpoints_activations(monkeypatch):
    import vllm_humming.moe.method as method_module

    lines = []
    monkeypatch.setattr(method_module.logger, "info_once", lambda text, *args: lines.append(text % args))
    for checkpoint, activation in (
        (MODELOPT, None),
        (_ct_with_input(), None),
        (_ct_with_input(), "16bit"),
        (None, "fp8"),
    ):
        _format(checkpoint, activation)
    fp8 = "num_bits 8, type float, strategy group, group_size 128, dynamic True"
    assert lines == [
        "NVFP4 experts run with 16-bit activations; the checkpoint says NVFP4",
        f"MXFP4 experts run with dynamic FP8 (a scale a token and 128 channels) activations; the checkpoint says {fp8}",
        f"MXFP4 experts run with 16-bit activations; the checkpoint says {fp8}",
    ]


def test_unknown_option_is_an_error_when_the_layer_is_built():
    with engine(additional={"humming": {"bakend": "x"}}), pytest.raises(ValueError, match="valid options: 'backend'"):
        build(CT_MXFP4, SIZES)


def test_mixed_precision_whose_layers_are_in_hf_quant_config(tmp_path):
    import json

    from vllm.config import DeviceConfig, ModelConfig, VllmConfig

    from vllm_humming.checkpoints import write_checkpoint

    vllm_humming.register()
    write_checkpoint(tmp_path, "qwen3-modelopt-mixed", seed=0)
    config = json.loads((tmp_path / "config.json").read_text())
    layers = config["quantization_config"].pop("quantized_layers")
    excluded = config["quantization_config"].pop("ignore")
    (tmp_path / "config.json").write_text(json.dumps(config))
    moved = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "exclude_modules": excluded}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": moved}))
    model = ModelConfig(str(tmp_path), quantization="humming", dtype="bfloat16", enforce_eager=True)
    config = VllmConfig(model_config=model, device_config=DeviceConfig(device="cpu")).quant_config
    assert config.quantized_layers == layers
    assert config.exclude_modules == excluded


# The loading tests take the other kinds the same way.
ACCEPTED = {
    "qwen3-mxfp4": "HummingShadow_compressed_tensors",
    "qwen3-mxfp4-w4a8": "HummingShadow_compressed_tensors",
    "qwen3-modelopt-old": "HummingShadow_modelopt_fp4",
    "qwen3-quark": "HummingShadow_quark",
    "qwen3-deepseek": "HummingShadow_deepseek_v4_fp8",
    "gpt-oss-mxfp4": "HummingShadow_gpt_oss_mxfp4",
    "qwen3-bf16": "HummingConfig",
}


@pytest.mark.parametrize("kind", ACCEPTED)
def test_vllm_accepts_real_checkpoints(kind, tmp_path):
    """The whole way from a model directory to the config object, through vLLM's own checks."""
    from vllm.config import DeviceConfig, ModelConfig, VllmConfig

    from vllm_humming.checkpoints import write_checkpoint

    vllm_humming.register()
    write_checkpoint(tmp_path, kind, seed=0)
    model = ModelConfig(str(tmp_path), quantization="humming", dtype="bfloat16", enforce_eager=True)
    config = VllmConfig(model_config=model, device_config=DeviceConfig(device="cpu")).quant_config
    assert type(config).__name__ == ACCEPTED[kind]
