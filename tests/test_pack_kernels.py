# SPDX-License-Identifier: Apache-2.0
"""csrc/moe/pack.cu, compiled for the host, against the definition of packing in torch. tests/gpu/check_decode.py does
the same on a GPU; here warps have one lane, so that only the sums over lanes are left to it.
"""

import ctypes
import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from vllm_humming.moe import packing
from vllm_humming.moe.findings import NONE, REFUSED, Field, Findings
from vllm_humming.moe.scales import window_of
from vllm_humming.moe.weight_formats import MXFP4, MXFP4_FP8, NVFP4

TESTS = Path(__file__).resolve().parent
CSRC = TESTS.parent / "csrc"
sys.path.insert(0, str(TESTS / "gpu"))
from check_decode import PACKING_KINDS, packing_inputs  # noqa: E402

ENTRY = """
using namespace vllm_humming;
extern "C" void pack_on_host(int format, int dtype, int64_t row_blocks, const PackParams* p) {
  launch_pack(static_cast<Format>(format), static_cast<DType>(dtype), row_blocks, *p, nullptr);
}
"""


class PackParams(ctypes.Structure):
    """csrc/moe/pack.h"""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "global_scale", "bias", "row_scale")),
        *((name, ctypes.c_void_p) for name in ("packed", "packed_row_scale", "packed_bias", "record")),
        *((name, ctypes.c_int) for name in ("rows_in", "k_in", "k_blocks", "global_stride")),
        *((name, ctypes.c_bool) for name in ("gated", "interleaved")),
        ("zero_group", ctypes.c_uint8),
    ]


def replaced(pattern, new, text, times):
    text, found = re.subn(pattern, new, text)
    assert found == times, pattern
    return text


@pytest.fixture(scope="module")
def pack_on_host(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    texts = [(CSRC / name).read_text() for name in ("mma/chunk.h", "moe/pack.h", "moe/pack.cu")]
    source = "\n".join(re.sub(r"(?m)^#(include|pragma once).*$", "", text) for text in texts)
    source = replaced(r"constexpr int kLanes = 32;", "constexpr int kLanes = 1;", source, 1)
    launch = r"(inspect|pack)(<F, Layout>)<<<(.*), (kThreads), 0, stream>>>\(p\);"

    def run(found):
        kernel, arguments, grid, threads = found.groups()
        return f"run({grid}, {threads}, {2 if kernel == 'pack' else 1}, [&] {{ {kernel}{arguments}(p); }});"

    source = replaced(launch, run, source, 2)
    directory = tmp_path_factory.mktemp("pack")
    (directory / "pack.cpp").write_text('#include "host_cuda.h"\n' + source + ENTRY)
    library = directory / "pack.so"
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{TESTS}", "-o", library, directory / "pack.cpp"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library)).pack_on_host


def packed_by(pack, source, fmt, dtype, k, gated, interleaved, spare):
    """(packed, row_scale, bias, record) over what held 77 before. spare: whether more rows and K are packed."""
    codes, scales, bias, factor = source
    n = codes.shape[0]
    make = {"has_bias": bias is not None, "device": "cpu", "weight_format": fmt}
    weights = packing.allocate(1, n + 128 * spare, k + 128 * spare, gated=gated, **make)
    target = [None if t is None else t[0].fill_(77) for t in weights.tensors]
    record = Findings(1, torch.device("cpu")).tensor[0]
    row_scale = torch.empty(n)
    if pack is None:
        packing.pack_rows(
            codes, scales, factor, bias, row_scale, *target, record,
            weight_format=fmt, window=window_of(dtype), gated=gated, interleaved=interleaved,
        )  # fmt: skip
    else:
        tensors = (codes, scales, factor, bias, row_scale, *target, record)
        addresses = [None if t is None else t.data_ptr() for t in tensors]
        stride = int(factor is not None and factor.numel() > 1)
        params = PackParams(*addresses, n, k, target[0].shape[1], stride, gated, interleaved, fmt.zero_group)
        pack(fmt.code, int(dtype == torch.float16), ctypes.c_int64(target[0].shape[0]), ctypes.byref(params))
    return *target, record


@pytest.mark.parametrize("kind", PACKING_KINDS)
@pytest.mark.parametrize("fmt", [MXFP4, NVFP4, MXFP4_FP8], ids=lambda fmt: fmt.name)
def test_the_kernels_pack_and_find_what_the_definition_does(pack_on_host, fmt, kind):
    gen = torch.Generator().manual_seed(0)
    records = []
    for dtype, (n, k), has_bias, order, spare in product(
        (torch.bfloat16, torch.float16),
        ((64, 128), (200, 352)),
        (False, True),
        ((False, False), (True, False), (True, True)),
        (False, True),
    ):
        source = packing_inputs(fmt, n, k, has_bias, kind, gen)
        want, found = (packed_by(pack, source, fmt, dtype, k, *order, spare) for pack in (None, pack_on_host))
        for a, b in zip(want, found, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)
        records.append(found[3].tolist())
        if any(found[3][field] != NONE for field in REFUSED):
            assert bool((found[0] == 77).all())
            assert bool((found[1] == 77).all())
    # each kind is what it says
    if kind == "bad scale":
        assert all(record[Field.SCALE] >> 32 in (62, 198) for record in records)
    if kind == "bad bias":
        assert sum(record[Field.BIAS] != NONE for record in records) == len(records) // 2
    if kind == "bad global":
        assert all((record[Field.GLOBAL] != NONE) == fmt.has_global for record in records)
    if kind == "bad window":
        assert all((record[Field.WINDOW] != NONE) == (fmt is MXFP4) for record in records)
    if kind == "wide":
        assert all((record[Field.ROUNDED] > 0) == (fmt is MXFP4_FP8) for record in records)


@pytest.mark.parametrize("fmt", [MXFP4, MXFP4_FP8], ids=lambda fmt: fmt.name)
def test_every_e8m0_byte_in_a_row_of_its_own_and_beside_others(pack_on_host, fmt):
    """Row shifts and roundings at the ends of fp32's range, subnormal row scales included."""
    order = torch.randperm(256, generator=torch.Generator().manual_seed(0))
    codes = torch.arange(256, dtype=torch.uint8)[order].repeat(256, 1)  # K = 512
    bytes_ = torch.arange(256)[:, None].clamp(max=254)
    for step in (0, 1, 5, 11, 13, 17, 24, 133):
        scales = (bytes_ - step * (torch.arange(16) % 2)).clamp(min=0).to(torch.uint8)
        for dtype in (torch.bfloat16, torch.float16):
            if fmt is MXFP4 and step > (24 if dtype == torch.float16 else 133):
                continue
            source = (codes, scales, None, None)
            want, found = (packed_by(p, source, fmt, dtype, 512, False, False, False) for p in (None, pack_on_host))
            assert all(a is None or torch.equal(a, b) for a, b in zip(want, found, strict=True))


def test_every_e4m3_byte(pack_on_host):
    gen = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (64, 128), generator=gen, dtype=torch.uint8)
    for first in range(0, 256, 16):
        scales = (torch.arange(16) + first).to(torch.uint8).repeat(64, 1)
        source = (codes, scales, None, torch.rand(64, generator=gen) + 0.5)
        want, found = (
            packed_by(p, source, NVFP4, torch.bfloat16, 256, True, True, False) for p in (None, pack_on_host)
        )
        assert all(a is None or torch.equal(a, b) for a, b in zip(want, found, strict=True))
        assert (found[3][Field.SCALE] != NONE) == (first + 15 >= 0x7F)
