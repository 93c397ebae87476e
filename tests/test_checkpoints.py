# SPDX-License-Identifier: Apache-2.0
"""The generated checkpoints: names and shapes of real ones, twins that hold the dequantised weights."""

import json

import pytest
import torch
from safetensors.torch import load_file

from vllm_humming.checkpoints import DEFAULT_SIZES, KINDS, Sizes, write_checkpoint
from vllm_humming.moe.quantize import dequantize_mxfp4, quantize_mxfp4

transformers = pytest.importorskip("transformers")

SMALL = Sizes(layers=1, hidden=96, intermediate=160, experts=4, top_k=2, head_dim=32)


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
    write_checkpoint(tmp_path / "model", request.param, twin=tmp_path / "twin", sizes=SMALL)
    return request.param, tmp_path / "model", tmp_path / "twin"


def test_names_shapes_and_dtypes_are_those_of_real_checkpoints(pair):
    kind, model, twin = pair
    found, dense = tensors(model), tensors(twin)
    if kind == "gpt-oss-mxfp4":
        prefix = "model.layers.0.mlp.experts."
        expected = {
            "gate_up_proj_blocks": ((4, 320, 3, 16), torch.uint8),
            "gate_up_proj_scales": ((4, 320, 3), torch.uint8),
            "gate_up_proj_bias": ((4, 320), torch.bfloat16),
            "down_proj_blocks": ((4, 96, 5, 16), torch.uint8),
            "down_proj_scales": ((4, 96, 5), torch.uint8),
            "down_proj_bias": ((4, 96), torch.bfloat16),
        }
        assert dense[prefix + "gate_up_proj"].shape == (4, 96, 320)
        assert dense[prefix + "down_proj"].shape == (4, 160, 96)
    else:
        prefix = "model.layers.0.mlp.experts.3."
        expected = {
            "gate_proj.weight": ((160, 96), torch.bfloat16),
            "down_proj.weight": ((96, 160), torch.bfloat16),
        }
        if kind == "qwen3-mxfp4":
            expected = {
                "gate_proj.weight_packed": ((160, 48), torch.uint8),
                "gate_proj.weight_scale": ((160, 3), torch.uint8),
                "up_proj.weight_packed": ((160, 48), torch.uint8),
                "down_proj.weight_packed": ((96, 80), torch.uint8),
                "down_proj.weight_scale": ((96, 5), torch.uint8),
            }
    for name, (shape, dtype) in expected.items():
        assert (tuple(found[prefix + name].shape), found[prefix + name].dtype) == (shape, dtype), name
    assert all(tensor.dtype == torch.bfloat16 for tensor in dense.values())


def test_the_twin_holds_the_dequantised_experts_and_all_else_unchanged(pair):
    kind, model, twin = pair
    found, dense = tensors(model), tensors(twin)
    experts = [name for name in dense if ".mlp.experts." in name and not name.endswith("_bias")]
    assert experts
    for name in experts:
        if kind == "qwen3-mxfp4":
            codes, scales = found[f"{name}_packed"], found[f"{name}_scale"]
            exact = dequantize_mxfp4(codes, scales, torch.float32)
        elif kind == "qwen3-bf16":
            exact = dequantize_mxfp4(*quantize_mxfp4(found[name]), torch.float32)
        else:
            pairs = zip(found[f"{name}_blocks"].flatten(2), found[f"{name}_scales"], strict=True)
            exact = torch.stack([dequantize_mxfp4(codes, scales, torch.float32).T for codes, scales in pairs])
        assert torch.equal(dense[name].float(), exact)  # e2m1 times a power of two is exact in BF16
    for name in dense.keys() - experts:
        assert torch.equal(dense[name], found[name])


def test_config_and_tokenizer_load(pair):
    kind, model, twin = pair
    config = transformers.AutoConfig.from_pretrained(model)
    assert config.num_experts_per_tok == 2
    assert config.hidden_size == 96
    method = {"qwen3-mxfp4": "compressed-tensors", "gpt-oss-mxfp4": "mxfp4"}.get(kind)
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


def test_gpt_oss_sizes_are_no_multiple_of_a_tile():
    assert DEFAULT_SIZES["gpt-oss-mxfp4"].hidden % 64
    assert DEFAULT_SIZES["gpt-oss-mxfp4"].intermediate % 64
