# SPDX-License-Identifier: Apache-2.0
"""The generated checkpoints: names and shapes of real ones, twins that hold the dequantised weights."""

import json

import pytest
import torch
from safetensors.torch import load_file

from vllm_humming.checkpoints import DEFAULT_SIZES, KINDS, Sizes, weight_format, write_checkpoint
from vllm_humming.moe.quantize import dequantize_mxfp4, dequantize_nvfp4, quantize_mxfp4, quantize_nvfp4
from vllm_humming.moe.weight_formats import MXFP4

transformers = pytest.importorskip("transformers")

SMALL = Sizes(layers=1, hidden=96, intermediate=160, experts=4, top_k=2, head_dim=32)
FP8_SMALL = Sizes(layers=1, hidden=128, intermediate=160, experts=4, top_k=2, head_dim=64)  # whole blocks of 128
U8, F32, BF16 = torch.uint8, torch.float32, torch.bfloat16
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu

EXPERT = "model.layers.0.mlp.experts.3."
EXPERTS = "model.layers.0.mlp.experts."
MODELOPT = {
    f"{EXPERT}gate_proj.weight": ((160, 48), U8),
    f"{EXPERT}gate_proj.weight_scale": ((160, 6), E4M3),
    f"{EXPERT}up_proj.weight_scale_2": ((), F32),
    f"{EXPERT}up_proj.input_scale": ((), F32),
    f"{EXPERT}down_proj.weight": ((96, 80), U8),
    f"{EXPERT}down_proj.weight_scale": ((96, 10), E4M3),
}
MXFP4_CT = {
    f"{EXPERT}gate_proj.weight_packed": ((160, 48), U8),
    f"{EXPERT}gate_proj.weight_scale": ((160, 3), U8),
    f"{EXPERT}up_proj.weight_packed": ((160, 48), U8),
    f"{EXPERT}down_proj.weight_packed": ((96, 80), U8),
    f"{EXPERT}down_proj.weight_scale": ((96, 5), U8),
}
NVFP4_CT = {
    f"{EXPERT}gate_proj.weight_packed": ((160, 48), U8),
    f"{EXPERT}gate_proj.weight_scale": ((160, 6), E4M3),
    f"{EXPERT}down_proj.weight_scale": ((96, 10), E4M3),
    f"{EXPERT}down_proj.weight_global_scale": ((1,), F32),
}
BF16_EXPERTS = {f"{EXPERT}gate_proj.weight": ((160, 96), BF16), f"{EXPERT}down_proj.weight": ((96, 160), BF16)}
NAMES = {
    "qwen3-mxfp4": MXFP4_CT,
    "qwen3-mxfp4-w4a8": MXFP4_CT,
    "qwen3-nvfp4": NVFP4_CT,
    "qwen3-nvfp4-w4a4": NVFP4_CT | {f"{EXPERT}down_proj.input_global_scale": ((1,), F32)},
    "qwen3-modelopt": MODELOPT,
    "qwen3-modelopt-old": MODELOPT,
    "qwen3-modelopt-mixed": MODELOPT,
    "qwen3-modelopt-fused": {
        f"{EXPERTS}gate_up_proj": ((4, 320, 48), U8),
        f"{EXPERTS}gate_up_proj_scale": ((4, 320, 6), E4M3),
        f"{EXPERTS}gate_up_proj_scale_2": ((4, 2), F32),
        f"{EXPERTS}down_proj": ((4, 96, 80), U8),
        f"{EXPERTS}down_proj_scale_2": ((4,), F32),
    },
    "qwen3-quark": {
        f"{EXPERT}gate_proj.weight": ((160, 48), U8),
        f"{EXPERT}down_proj.weight_scale": ((96, 5), U8),
    },
    "qwen3-deepseek": {
        f"{EXPERT}gate_proj.weight": ((160, 64), torch.int8),
        f"{EXPERT}gate_proj.weight_scale": ((160, 4), E8M0),
        "model.layers.0.self_attn.q_proj.weight": ((256, 128), E4M3),
        "model.layers.0.self_attn.q_proj.weight_scale_inv": ((2, 1), E8M0),
    },
    "qwen3-mxfp4-linears": MXFP4_CT
    | {
        "model.layers.0.self_attn.q_proj.weight_packed": ((128, 48), U8),
        "model.layers.0.self_attn.o_proj.weight_scale": ((96, 4), U8),
    },
    "qwen3-nvfp4-linears": NVFP4_CT
    | {
        "model.layers.0.self_attn.k_proj.weight_global_scale": ((1,), F32),
        "model.layers.0.self_attn.k_proj.input_global_scale": ((1,), F32),
        "model.layers.0.self_attn.o_proj.weight_scale": ((96, 8), E4M3),
    },
    "qwen3-modelopt-linears": MODELOPT
    | {
        "model.layers.0.self_attn.v_proj.weight": ((64, 48), U8),
        "model.layers.0.self_attn.v_proj.weight_scale_2": ((), F32),
    },
    "gpt-oss-mxfp4": {
        f"{EXPERTS}gate_up_proj_blocks": ((4, 320, 3, 16), U8),
        f"{EXPERTS}gate_up_proj_scales": ((4, 320, 3), U8),
        f"{EXPERTS}gate_up_proj_bias": ((4, 320), BF16),
        f"{EXPERTS}down_proj_blocks": ((4, 96, 5, 16), U8),
        f"{EXPERTS}down_proj_scales": ((4, 96, 5), U8),
        f"{EXPERTS}down_proj_bias": ((4, 96), BF16),
    },
    "nemotron-h-modelopt": {
        "backbone.layers.1.mixer.experts.3.up_proj.weight": ((160, 48), U8),
        "backbone.layers.1.mixer.experts.3.down_proj.weight_scale": ((96, 10), E4M3),
        "backbone.layers.1.mixer.shared_experts.up_proj.weight": ((160, 96), BF16),
        "backbone.layers.0.mixer.q_proj.weight": ((128, 96), BF16),
    },
    "qwen3-bf16": BF16_EXPERTS,
    "qwen3-bf16-nvfp4": BF16_EXPERTS,
}


def tensors(directory):
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    found = {}
    for name in sorted(set(index["weight_map"].values())):
        part = load_file(directory / name)
        assert {index["weight_map"][key] for key in part} == {name}
        found |= part
    assert found.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    return found


@pytest.fixture(params=KINDS)
def pair(request, tmp_path):
    sizes = FP8_SMALL if request.param == "qwen3-deepseek" else SMALL
    write_checkpoint(tmp_path / "model", request.param, twin=tmp_path / "twin", sizes=sizes)
    return request.param, tmp_path / "model", tmp_path / "twin"


def test_names_shapes_and_dtypes_are_those_of_real_checkpoints(pair):
    kind, model, twin = pair
    found, dense = tensors(model), tensors(twin)
    for name, (shape, dtype) in NAMES[kind].items():
        assert (tuple(found[name].shape), found[name].dtype) == (shape, dtype), name
    if kind == "gpt-oss-mxfp4":
        assert dense[f"{EXPERTS}gate_up_proj"].shape == (4, 96, 320)
        assert dense[f"{EXPERTS}down_proj"].shape == (4, 160, 96)
    exact = {BF16} if weight_format(kind) is MXFP4 else {BF16, F32}
    assert {tensor.dtype for tensor in dense.values()} == exact


def dequantised(found, name):
    """The float32 weight of a twin's expert tensor, from the tensors of any kind of checkpoint."""
    if f"{name}_blocks" in found:
        pairs = zip(found[f"{name}_blocks"].flatten(2), found[f"{name}_scales"], strict=True)
        return torch.stack([dequantize_mxfp4(codes, scales, F32).T for codes, scales in pairs])
    if f"{EXPERTS}gate_up_proj" in found:
        expert, projection = int(name.split(".")[5]), name.split(".")[6]
        fused = projection if projection == "down_proj" else "gate_up_proj"
        codes, scales, factor = (found[f"{EXPERTS}{fused}{suffix}"][expert] for suffix in ("", "_scale", "_scale_2"))
        if fused == "gate_up_proj":
            half = int(projection == "up_proj")
            codes, scales, factor = codes.chunk(2)[half], scales.view(U8).chunk(2)[half], factor[half]
        return dequantize_nvfp4(codes, scales.view(U8), factor, F32)
    codes = found[f"{name}_packed"] if f"{name}_packed" in found else found[name]
    if codes.dtype == BF16:
        return None
    scales = found[f"{name}_scale"].view(U8)
    if f"{name}_scale_2" in found:
        return dequantize_nvfp4(codes, scales, found[f"{name}_scale_2"], F32)
    if f"{name}_global_scale" in found:
        return dequantize_nvfp4(codes, scales, found[f"{name}_global_scale"].reciprocal(), F32)
    return dequantize_mxfp4(codes.view(U8), scales, F32)


def test_the_twin_holds_the_dequantised_weights_and_all_else_unchanged(pair):
    kind, model, twin = pair
    found, dense = tensors(model), tensors(twin)
    parts = (".experts.", *((".self_attn.",) if kind.endswith("-linears") else ()))
    quantised = [
        name for name in dense if any(part in name for part in parts) and not name.endswith(("_bias", "_norm.weight"))
    ]
    assert quantised
    for name in quantised:
        exact = dequantised(found, name)
        if exact is None and weight_format(kind) is MXFP4:
            exact = dequantize_mxfp4(*quantize_mxfp4(found[name]), F32)
        elif exact is None:
            exact = dequantize_nvfp4(*quantize_nvfp4(found[name]), F32)
        assert torch.equal(dense[name].float(), exact)  # e2m1 times a power of two is exact in BF16
    for name in dense.keys() - quantised:
        if f"{name}_scale_inv" in found:
            scales = found[f"{name}_scale_inv"].float().repeat_interleave(128, 0).repeat_interleave(128, 1)
            assert torch.equal(dense[name].float(), found[name].float() * scales)
        else:
            assert torch.equal(dense[name], found[name])


def test_config_and_tokenizer_load(pair):
    kind, model, twin = pair
    config = transformers.AutoConfig.from_pretrained(model)
    assert config.num_experts_per_tok == 2
    assert config.hidden_size == (128 if kind == "qwen3-deepseek" else 96)
    methods = {
        "qwen3-mxfp4": "compressed-tensors",
        "qwen3-mxfp4-w4a8": "compressed-tensors",
        "qwen3-nvfp4": "compressed-tensors",
        "qwen3-nvfp4-w4a4": "compressed-tensors",
        "qwen3-modelopt": "modelopt",
        "qwen3-modelopt-mixed": "modelopt",
        "qwen3-modelopt-fused": "modelopt",
        "qwen3-quark": "quark",
        "qwen3-mxfp4-linears": "compressed-tensors",
        "qwen3-nvfp4-linears": "compressed-tensors",
        "qwen3-modelopt-linears": "modelopt",
        "qwen3-deepseek": "deepseek_v4_fp8",
        "gpt-oss-mxfp4": "mxfp4",
        "nemotron-h-modelopt": "modelopt",
    }
    method = methods.get(kind)
    assert (model / "hf_quant_config.json").exists() == (kind == "qwen3-modelopt-old")
    assert (getattr(config, "quantization_config", None) or {}).get("quant_method") == method
    assert not hasattr(transformers.AutoConfig.from_pretrained(twin), "quantization_config")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    text = "Any text: äöü, 漢字, \x00\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token_id == config.eos_token_id


def test_the_same_seed_gives_the_same_files_and_another_does_not(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_checkpoint(tmp_path / name, "qwen3-mxfp4", sizes=SMALL, seed=seed)
    a, b, c = (
        {path.name: path.read_bytes() for path in sorted((tmp_path / name).iterdir())} for name in ("a", "b", "c")
    )
    assert a == b
    assert a != c


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 100}, "hidden is 100, expected a positive multiple of 32"),
        ({"intermediate": 0}, "intermediate is 0"),
        ({"experts": 32}, "experts <= hidden / 4"),
        ({"top_k": 5}, "top_k 5, experts 4"),
        ({"vocab": 64}, "vocab is 64, the tokenizer needs at least"),
        ({"heads": 3}, "heads 3"),
        ({"kv_heads": 0}, "kv_heads 0: not a transformer"),
    ],
)
def test_impossible_sizes_are_refused(tmp_path, change, message):
    sizes = Sizes(**(SMALL.__dict__ | change))
    with pytest.raises(ValueError, match=message):
        write_checkpoint(tmp_path, "qwen3-mxfp4", sizes=sizes)
    with pytest.raises(ValueError, match="unknown checkpoint kind 'int4'; known: qwen3-mxfp4"):
        write_checkpoint(tmp_path, "int4")


def test_sizes_of_no_whole_group_or_block_are_refused(tmp_path):
    sizes = Sizes(**(SMALL.__dict__ | {"hidden": 72}))
    with pytest.raises(ValueError, match="hidden is 72, expected a positive multiple of 16"):
        write_checkpoint(tmp_path, "qwen3-modelopt", sizes=sizes)
    with pytest.raises(ValueError, match="hidden is 96, block FP8 needs a multiple of 128"):
        write_checkpoint(tmp_path, "qwen3-deepseek", sizes=SMALL)


def test_gpt_oss_sizes_are_no_multiple_of_a_tile():
    assert DEFAULT_SIZES["gpt-oss-mxfp4"].hidden % 64
    assert DEFAULT_SIZES["gpt-oss-mxfp4"].intermediate % 64
