# SPDX-License-Identifier: Apache-2.0
"""vLLM's real models, loaders and checkpoint files, up to the packed weights. Attention is left out."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from layers import engine, non_gated_layers_allowed, runs_block_fp8_linears
from safetensors.torch import load_file

import vllm_humming
from vllm_humming import compat
from vllm_humming.checkpoints import KINDS, Sizes, weight_format, write_checkpoint
from vllm_humming.moe import packing
from vllm_humming.moe.weight_formats import NVFP4

MODULES = {"gpt-oss-mxfp4": "gpt_oss", "nemotron-h-modelopt": "nemotron_h"}
OPTIONS = {"qwen3-bf16-nvfp4": {"humming": {"online_format": "nvfp4"}}} | {
    kind: {"humming": {"linears": "humming"}} for kind in KINDS if kind.endswith("-linears")
}
needs_fp8 = pytest.mark.skipif(
    not runs_block_fp8_linears(), reason="this vLLM has no kernel for block-FP8 linears here"
)
needs_fused = pytest.mark.skipif(
    (compat.vllm_version() or (9, 9)) < (0, 32), reason="vLLM before 0.32 transposes packed 3-D expert tensors"
)
# Not those whose tensors another kind has, too; the engine tests run every kind.
LOADED = [kind for kind in KINDS if kind not in ("qwen3-nvfp4", "qwen3-modelopt")]
MARKS = {"qwen3-deepseek": needs_fp8, "qwen3-modelopt-fused": needs_fused}


class NoAttention(torch.nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()


def load_model(
    directory, kind, monkeypatch, load_format="auto", method="HummingMoEMethod", redundant: int | None = None
):
    """The MoE layers of the model that vLLM builds and loads from a directory, or its linears that run here.

    redundant: experts that expert load balancing adds (None: without it).
    """
    from vllm.config import DeviceConfig, LoadConfig, ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    vllm_humming.register()
    module = importlib.import_module(f"vllm.model_executor.models.{MODULES.get(kind, 'qwen3_moe')}")
    monkeypatch.setattr(module, "Attention", NoAttention)
    model_config = ModelConfig(str(directory), quantization="humming", dtype="bfloat16", enforce_eager=True)
    load_config = LoadConfig(load_format=load_format)
    config = VllmConfig(
        model_config=model_config,
        device_config=DeviceConfig(device="cpu"),
        load_config=load_config,
        additional_config=OPTIONS.get(kind, {}),
    )
    if redundant is not None:
        config.parallel_config.enable_eplb = True  # afterwards: vLLM's check allows it on GPUs only
        config.parallel_config.eplb_config.num_redundant_experts = redundant
    with engine():  # parallel groups
        pass
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16), non_gated_layers_allowed():
        model = initialize_model(config)
        get_model_loader(load_config).load_weights(model, model_config)
        process_weights_after_loading(model, model_config, torch.device("cpu"))
    return [module for module in model.modules() if type(getattr(module, "quant_method", None)).__name__ == method]


def twin_experts(directory, layer, experts):
    """Per expert (w13 [2I, H] gate then up, w2 [H, I], b13, b2) of a dequantised checkpoint."""
    tensors: dict[str, torch.Tensor] = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
    prefix = f"model.layers.{layer}.mlp.experts."
    nemotron = f"backbone.layers.{2 * layer + 1}.mixer.experts."
    for e in range(experts):
        if f"{nemotron}{e}.up_proj.weight" in tensors:
            yield *(tensors[f"{nemotron}{e}.{name}_proj.weight"] for name in ("up", "down")), None, None
        elif f"{prefix}gate_up_proj" in tensors:
            w13, b13 = tensors[f"{prefix}gate_up_proj"][e].T, tensors[f"{prefix}gate_up_proj_bias"][e]
            w2, b2 = tensors[f"{prefix}down_proj"][e].T, tensors[f"{prefix}down_proj_bias"][e]
            yield torch.cat([w13[::2], w13[1::2]]), w2, torch.cat([b13[::2], b13[1::2]]), b2
        else:
            names = [f"{prefix}{e}.{name}_proj.weight" for name in ("gate", "up", "down")]
            yield torch.cat([tensors[name] for name in names[:2]]), tensors[names[2]], None, None


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=MARKS.get(kind, ())) for kind in LOADED])
def test_packed_weights_equal_the_dequantised_checkpoint(kind, tmp_path, monkeypatch):
    sizes = Sizes(hidden=272, intermediate=208) if weight_format(kind) is NVFP4 else None  # 17 and 13 scale groups
    write_checkpoint(tmp_path / "model", kind, twin=tmp_path / "twin", sizes=sizes, seed=3)
    layers = load_model(tmp_path / "model", kind, monkeypatch)
    assert len(layers) == 2
    packed_of = importlib.import_module("vllm_humming.moe.experts").packed_of
    for index, layer in enumerate(layers):
        for e, (w13, w2, b13, b2) in enumerate(twin_experts(tmp_path / "twin", index, layer.local_num_experts)):
            for projection, weight, bias in (("w13", w13, b13), ("w2", w2, b2)):
                found, found_bias = packing.unpack_expert(
                    packed_of(layer, layer.quant_method.weight_format)[projection],
                    e,
                    dtype=torch.bfloat16,
                    k=weight.shape[1],
                    out_features=weight.shape[0],
                    gated=projection == "w13" and layer.activation.is_gated,
                )
                assert torch.equal(found, weight.float())
                assert (found_bias is None) if bias is None else torch.equal(found_bias, bias.float())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.endswith("-linears")])
def test_packed_linears_equal_the_dequantised_checkpoint(kind, tmp_path, monkeypatch):
    write_checkpoint(tmp_path / "model", kind, twin=tmp_path / "twin", sizes=Sizes(hidden=288), seed=3)
    layers = load_model(tmp_path / "model", kind, monkeypatch, method="HummingLinearMethod")
    tensors: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "twin").glob("*.safetensors"):
        tensors |= load_file(file)
    assert [layer.prefix for layer in layers] == [
        f"model.layers.{index}.self_attn.{name}" for index in range(2) for name in ("qkv_proj", "o_proj")
    ]
    for layer in layers:
        prefix = layer.prefix.rsplit(".", 1)[0]
        names = ("q", "k", "v") if layer.prefix.endswith("qkv_proj") else ("o",)
        weight = torch.cat([tensors[f"{prefix}.{name}_proj.weight"] for name in names]).float()
        method = layer.quant_method
        found, _ = packing.unpack_expert(
            packing.PackedProjection(layer.weight_packed, layer.row_scale, None, method.weight_format),
            0,
            dtype=torch.bfloat16,
            k=weight.shape[1],
            out_features=weight.shape[0],
            gated=False,
        )
        assert torch.equal(found, weight)


@pytest.mark.parametrize(
    "kind",
    [
        "qwen3-mxfp4",
        "nemotron-h-modelopt",
        "qwen3-bf16-nvfp4",
        pytest.param("qwen3-modelopt-fused", marks=needs_fused),
    ],
)
def test_redundant_experts_are_loaded_by_vllms_models(kind, tmp_path, monkeypatch):
    """Copies of the first experts come after the logical ones, whichever of its loaders vLLM takes."""
    write_checkpoint(tmp_path, kind, seed=3)
    plain, more = load_model(tmp_path, kind, monkeypatch), load_model(tmp_path, kind, monkeypatch, redundant=3)
    for left, right in zip(plain, more, strict=True):
        logical = left.local_num_experts
        assert right.local_num_experts == right.global_num_experts == logical + 3
        for name, parameter in right.named_parameters():
            if name == "e_score_correction_bias":  # the router's, by logical expert; vLLM does not move it
                continue
            for slot in range(logical + 3):
                assert torch.equal(parameter[slot], left.get_parameter(name)[slot % logical]), (name, slot)


def test_a_checkpoint_without_one_expert_is_refused(tmp_path, monkeypatch):
    from safetensors.torch import save_file

    write_checkpoint(tmp_path, "qwen3-mxfp4", seed=3)
    for file in tmp_path.glob("*.safetensors"):
        tensors = load_file(file)
        save_file({n: t for n, t in tensors.items() if "layers.1.mlp.experts.5.up_proj.weight_s" not in n}, file)
    with pytest.raises(
        ValueError, match=r"model\.layers\.1\.mlp\.experts: .*lacks 1 tensor of.*expert 5 w3_weight_scale"
    ):
        load_model(tmp_path, "qwen3-mxfp4", monkeypatch)


UP = "model.layers.1.mlp.experts.5.up_proj."
DAMAGES = {
    "missing": ("weight_scale_2", None, "lacks 1 tensor of.*expert 5 w3_weight_scale_2"),
    "zero": ("weight_scale_2", torch.zeros_like, "expert 5: w3_weight_scale_2 .*positive and finite, found 0.0"),
    "nan": (
        "weight_scale",
        lambda t: torch.full_like(t.float(), torch.nan).to(t.dtype),
        "expert 5: w3 scale .* is nan",
    ),
    "truncated": ("weight", lambda t: t[:-1], r"expert 5: w3_weight must have shape \(208, 136\), found \(207, 136\)"),
    "dtype": (
        "weight_scale",
        torch.Tensor.half,
        "expert 5: w3_weight_scale must be .*float8_e4m3fn.*found torch.float16",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_nvfp4_checkpoint_is_refused(damage, tmp_path, monkeypatch):
    from safetensors.torch import save_file

    suffix, change, message = DAMAGES[damage]
    sizes = Sizes(hidden=272, intermediate=208)
    write_checkpoint(tmp_path, "qwen3-modelopt", sizes=sizes, seed=3)
    (file,) = tmp_path.glob("*3-of*.safetensors")
    tensors = load_file(file)
    damaged = tensors.pop(UP + suffix)
    if change is not None:
        tensors[UP + suffix] = change(damaged).contiguous()
    save_file(tensors, file)
    with pytest.raises(ValueError, match=rf"model\.layers\.1\.mlp\.experts: .*{message}"):
        load_model(tmp_path, "qwen3-modelopt", monkeypatch)


@pytest.mark.parametrize("kind", ["qwen3-bf16-nvfp4"])
def test_fused_bf16_experts_are_quantised_like_single_ones(kind, tmp_path, monkeypatch):
    """One [E, 2I, H] and one [E, H, I] tensor a layer, as newer BF16 checkpoints have."""
    from safetensors.torch import save_file

    sizes = Sizes(experts=4)
    write_checkpoint(tmp_path / "split", kind, sizes=sizes, seed=3)
    write_checkpoint(tmp_path / "fused", kind, sizes=sizes, seed=3)
    for file in (tmp_path / "fused").glob("*.safetensors"):
        tensors = load_file(file)
        stacked: dict[str, list] = {}
        for name in [name for name in tensors if ".experts." in name]:
            prefix, expert, projection, _ = name.rsplit(".", 3)
            stacked.setdefault(f"{prefix}.{projection}", [None] * 4)[int(expert)] = tensors.pop(name)
        for name in [name for name in stacked if name.endswith("gate_proj")]:
            prefix = name.removesuffix("gate_proj")
            gate, up, down = (torch.stack(stacked[f"{prefix}{part}_proj"]) for part in ("gate", "up", "down"))
            tensors |= {f"{prefix}gate_up_proj": torch.cat([gate, up], 1), f"{prefix}down_proj": down}
        save_file(tensors, file)
    index = tmp_path / "fused" / "model.safetensors.index.json"
    index.unlink()  # names changed; vLLM takes every file then
    split, fused = (load_model(tmp_path / name, kind, monkeypatch) for name in ("split", "fused"))
    for left, right in zip(split, fused, strict=True):
        for (name, a), (_, b) in zip(left.named_parameters(), right.named_parameters(), strict=True):
            assert torch.equal(a, b), name


@pytest.mark.parametrize("kind", ["gpt-oss-mxfp4", "qwen3-bf16", "qwen3-modelopt"])
def test_dummy_loader(kind, tmp_path, monkeypatch):
    write_checkpoint(tmp_path, kind, seed=3)
    for layer in load_model(tmp_path, kind, monkeypatch, load_format="dummy"):
        method = layer.quant_method
        x = torch.randn(16, layer.hidden_size).bfloat16()
        ids = torch.randint(0, layer.global_num_experts, (16, 2), dtype=torch.int32)
        y = method.apply(layer, x, torch.full((16, 2), 0.5), ids, None, None)
        assert torch.isfinite(y).all()
        assert y.any()


def test_load_format_is_seen_where_layers_are_built(monkeypatch):
    from vllm_humming import compat

    monkeypatch.setattr(
        compat, "current_config", lambda: SimpleNamespace(load_config=SimpleNamespace(load_format="dummy"))
    )
    assert compat.uses_dummy_weights()
