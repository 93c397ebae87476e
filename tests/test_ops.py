# SPDX-License-Identifier: Apache-2.0
"""Schemas, fakes, refusals and the kernel loader; none of it needs a GPU or vLLM."""

import math
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vllm_humming import ops
from vllm_humming.moe.findings import Findings
from vllm_humming.moe.packing import allocate, pack_expert
from vllm_humming.moe.weight_formats import WEIGHT_FORMATS


def moe_args(tokens=3, hidden=96, dtype=torch.bfloat16, **changes):
    w13 = allocate(2, 128, hidden, gated=True, has_bias=False, device="cpu", pad_rows_to=128)
    w2 = allocate(2, hidden, 64, gated=False, has_bias=False, device="cpu")
    args = {
        "x": torch.zeros(tokens, hidden, dtype=dtype),
        "topk_weights": torch.ones(tokens, 2),
        "topk_ids": torch.zeros(tokens, 2, dtype=torch.int32),
        "expert_map": None,
        "w13": w13.packed,
        "w13_row_scale": w13.row_scale,
        "w13_bias": None,
        "w2": w2.packed,
        "w2_row_scale": w2.row_scale,
        "w2_bias": None,
        "workspace": torch.empty(0, dtype=torch.uint8),
        "out": torch.full((tokens, hidden), math.nan, dtype=dtype),
        "weight_format": 0,
        "activation": 0,
        "alpha": 1.0,
        "beta": 0.0,
        "limit": math.inf,
        "router_weight_on_input": False,
        "tile1": 0,
        "tile2": 0,
    }
    return args | changes


def test_schemas():
    schema = torch.ops.vllm_humming.moe.default._schema
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    assert written == ["workspace", "out"]
    assert [a.name for a in schema.arguments] == list(moe_args())
    assert len(schema.returns) == 0


@pytest.mark.parametrize("fmt", WEIGHT_FORMATS.values(), ids=WEIGHT_FORMATS)
def test_experts_of_zero_weights_give_zero(fmt):
    w13 = allocate(2, 128, 96, gated=True, has_bias=False, device="cpu", pad_rows_to=128, weight_format=fmt)
    w2 = allocate(2, 96, 64, gated=False, has_bias=False, device="cpu", weight_format=fmt)
    args = moe_args(w13=w13.packed, w2=w2.packed, weight_format=fmt.code)
    torch.ops.vllm_humming.moe(**args)
    assert torch.equal(args["out"], torch.zeros_like(args["out"]))


def test_moe_under_the_op_checks():
    torch.library.opcheck(torch.ops.vllm_humming.moe.default, tuple(moe_args().values()))


def test_fakes_do_no_work():
    with FakeTensorMode(allow_non_fake_inputs=True):
        args = moe_args(tokens=131072)
        assert torch.ops.vllm_humming.moe(**args) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_format": 7}, "weight_format must be one of .*2: 'mxfp4_fp8'"),
        ({"activation": 3}, "activation must be 0, 1 or 2"),
        ({"activation": 2}, "w13 must have 128 rows"),
        ({"out": torch.empty(2, 96, dtype=torch.bfloat16)}, "x and out must be"),
        ({"x": torch.zeros(3, 96)}, "x and out must be"),
        ({"w2": torch.zeros(2, 2, 1, 4096, dtype=torch.uint8)}, "w2 must be uint8"),
        ({"weight_format": 1}, r"w13 must be uint8 \[E, rows/64, K/128, 4608\] \(NVFP4\), found"),
        ({"w2": torch.zeros(2, 2, 1, 4608, dtype=torch.uint8)}, r"w2 must be uint8 .*4352\] \(MXFP4\), found"),
        (
            {"weight_format": 2, "w2": torch.zeros(2, 2, 1, 4608, dtype=torch.uint8)},
            r"w2 must be uint8 .*4352\] \(MXFP4 for FP8\), found",
        ),
        ({"w13_row_scale": torch.ones(2, 64)}, "w13 row_scale must be float32"),
        ({"topk_ids": torch.zeros(2, 2, dtype=torch.int32)}, "topk_ids and topk_weights must be"),
        ({"x": torch.zeros(3, 224).half(), "out": torch.zeros(3, 224).half()}, "x has H = 224"),
        ({"x": torch.zeros(96).half(), "out": torch.zeros(96).half()}, r"x and out must be \[M, H\]"),
        ({"x": torch.zeros(96, 3).bfloat16().T}, "x and out must be contiguous"),
        ({"topk_ids": torch.zeros(3, 2, dtype=torch.int64)}, r"topk_ids must be contiguous int32 \(3, 2\)"),
        ({"topk_ids": torch.zeros(3, 2)}, r"topk_ids must be contiguous int32 \(3, 2\)"),
        ({"topk_weights": torch.ones(3, 2).half()}, "topk_weights must be contiguous float32, found torch.float16"),
        (
            {"topk_ids": torch.zeros(3, 0, dtype=torch.int32), "topk_weights": torch.ones(3, 0)},
            "top_k must be at least 1",
        ),
        ({"expert_map": torch.zeros(2, dtype=torch.int64)}, r"expert_map must be contiguous int32 \(2,\)"),
        ({"w13_row_scale": torch.ones(128, 2).T}, "w13 row_scale must be float32 .* contiguous"),
    ],
)
def test_wrong_arguments_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        torch.ops.vllm_humming.moe(**moe_args(**changes))


def test_missing_kernels_say_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(ops, "LIBRARY_PATH", tmp_path / "_kernels.so")
    monkeypatch.setattr(ops, "_loaded", False)
    assert not ops.kernels_available()
    with pytest.raises(RuntimeError, match=r"not installed.*nvcc.*reinstall vllm-humming"):
        ops.load_kernels()
    with pytest.raises(RuntimeError, match="not installed"):
        ops._refuse()


def test_kernels_that_do_not_load_say_so_and_leave_the_ops_usable(monkeypatch, tmp_path):
    path = tmp_path / "_kernels.so"
    path.write_bytes(b"no library")
    monkeypatch.setattr(ops, "LIBRARY_PATH", path)
    monkeypatch.setattr(ops, "_loaded", False)
    assert ops.kernels_available()
    with pytest.raises(RuntimeError, match=r"do not load with torch.*rebuild"):
        ops.load_kernels()
    assert torch.ops.vllm_humming.moe_workspace_bytes(1, 2, 3, 4, 128, 0) >= 0
    torch.ops.vllm_humming.moe(**moe_args())


def test_cuda_tensors_are_refused_before_the_kernels_are_loaded():
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert all(has(f"vllm_humming::{name}", "CUDA") for name in ops._CPU_OPS)


@pytest.mark.parametrize("gate_up", [None, "packed", "interleaved"])
def test_pack_rows_is_what_pack_expert_does(gate_up):
    fmt, gated = WEIGHT_FORMATS["nvfp4"], gate_up is not None
    codes = torch.randint(1, 256, (96, 40), dtype=torch.uint8) | 0x11
    scales = torch.randint(0x28, 0x38, (96, 5), dtype=torch.uint8)
    bias, factor = torch.randn(96), torch.rand(96) + 0.5
    make = {"gated": gated, "has_bias": True, "device": "cpu", "weight_format": fmt}
    whole, placed = allocate(1, 96, 80, **make), allocate(1, 96, 80, **make)
    pack_expert(
        whole, 0, codes, scales, bias, global_scale=factor, gated=gated, gate_up=gate_up or "packed",
        dtype=torch.float16, layer="l",
    )  # fmt: skip
    findings = Findings(1, torch.device("cpu"))
    arguments = (codes, scales, factor, bias, torch.empty(96), *(t[0] for t in placed.tensors), findings.records[0])
    options = (fmt.code, 1, gated, gate_up == "interleaved", fmt.zero_group)
    torch.ops.vllm_humming.pack_rows(*arguments, *options)
    assert all(torch.equal(*pair) for pair in zip(whole.tensors, placed.tensors, strict=True))
    assert findings.read() == [findings.clear.tolist()]
    with pytest.raises(ValueError, match="do not fit packed weights"):
        torch.ops.vllm_humming.pack_rows(codes.repeat(3, 1), *arguments[1:], *options)
    with pytest.raises(ValueError, match="zero_group"):
        torch.ops.vllm_humming.pack_rows(*arguments, *options[:-1], 0)
    with pytest.raises(ValueError, match="global_scale is missing"):
        torch.ops.vllm_humming.pack_rows(codes, scales, None, *arguments[3:], *options)
    with pytest.raises(ValueError, match=r"record must be int64 \(6,\), found torch.int64 \(5,\)"):
        torch.ops.vllm_humming.pack_rows(*arguments[:-1], findings.records[0][:5], *options)


def test_import_needs_torch_only():
    code = (
        "import sys, vllm_humming.ops, vllm_humming.moe.quantize, vllm_humming.quant_methods.loading; "
        "assert 'vllm' not in sys.modules, 'vllm was imported'; "
        "import torch; assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(not ops.kernels_available(), reason="installed without kernels")
def test_compiled_library_loads_and_has_the_schedules_tiles():
    code = (
        "import torch; from vllm_humming import ops; from vllm_humming.moe import schedule; "
        "ops.load_kernels(); ops.load_kernels(); "
        "field = torch.ops.vllm_humming.tile_field; "
        "listed = lambda t: tuple(field(t, 6 + i) for i in range(2 * field(t, 5))); "
        "compiled = [(field(t, 0), listed(t)) for t in range(field(-1, 0))]; "
        "assert compiled == [(t.blocks, t.widths + t.cycles) for t in schedule.TILES], compiled; "
        "sizes = [torch.ops.vllm_humming.moe_workspace_bytes(m, 8, 128, 2048, 768, 0) for m in range(0, 40000, 97)]; "
        "assert sizes == sorted(sizes); "
        "op = torch.ops.vllm_humming; "
        "sizes = [op.grouped_gemm_workspace_bytes(m, 8, 2048, 2, 2) for m in range(0, 40000, 97)]; "
        "assert sizes == sorted(sizes) and sizes[-1] > 39000 * 2048; "
        "sizes = [op.moe_batched_workspace_bytes(m, 8, 2048, 768, 0) for m in range(0, 4000, 97)]; "
        "assert sizes == sorted(sizes) and sizes[-1] > 8 * 3900 * 768 * 2"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
