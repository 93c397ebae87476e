# SPDX-License-Identifier: Apache-2.0
"""The packed layout against a scalar reading of docs/kernel-notes.md, and its refusals."""

import math
import random

import packed_layout
import pytest
import torch
from packed_layout import DTYPES, ORDERS, bits_to_float, packed_row

from vllm_humming.moe import codes as code_layout
from vllm_humming.moe import weight_formats
from vllm_humming.moe.packing import allocate, pack_expert, padded_k, padded_rows, unpack_expert
from vllm_humming.moe.quantize import dequantize_mxfp4
from vllm_humming.moe.weight_formats import factor_table

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def decode_chunk(chunk, dtype):
    def factor_of(row, k):
        p = chunk[4096 + row * 4 + k // 32]
        factor = bits_to_float(p << (7 if dtype == torch.bfloat16 else 10), dtype)
        assert math.isfinite(factor)
        assert factor > 0
        return factor

    return packed_layout.decode_chunk(chunk, dtype, factor_of)


def random_projection(n, k, seed, low=104, high=124):
    gen = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (n, k // 2), generator=gen, dtype=torch.uint8)
    scales = torch.randint(low, high, (n, k // 32), generator=gen, dtype=torch.uint8)
    return codes, scales, torch.randn(n, generator=gen)


def every_code_and_scale():
    """[64, 128]: group i (row-major) has scale byte min(i, 254) and every code twice."""
    codes = torch.arange(32).remainder(16).roll(3)
    codes = (codes[0::2] | codes[1::2] << 4).to(torch.uint8).repeat(64, 4)
    return codes, torch.arange(256).clamp(max=254).view(64, 4).to(torch.uint8)


def to_halves(w):
    """Interleaved rows (gate0, up0, ...) -> [gate; up]."""
    return torch.cat([w[0::2], w[1::2]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("gated", "gate_up"), ORDERS)
def test_threads_decode_every_code_and_scale(dtype, gated, gate_up):
    codes, scales = every_code_and_scale()
    p = allocate(1, 64, 128, gated=gated, has_bias=False, device="cpu", pad_rows_to=32 if gated else 64)
    pack_expert(p, 0, codes, scales, None, gated=gated, gate_up=gate_up, dtype=dtype, layer="l")
    weights = decode_chunk(p.packed[0, 0, 0].tolist(), dtype)
    for row in range(64):
        block, place = packed_row(row, 64, gated, gate_up)
        assert block == 0
        scale = p.row_scale[0, place].item()
        for k in range(128):
            byte = int(codes[row, k // 2])
            code = byte >> 4 if k % 2 else byte & 15
            want = math.ldexp(E2M1[code & 7], int(scales[row, k // 32]) - 127) * (-1 if code & 8 else 1)
            got = weights[place, k] * scale
            assert got == want
            assert math.copysign(1, got) == math.copysign(1, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("gated", "gate_up"), ORDERS)
@pytest.mark.parametrize(("n", "k"), [(2880, 2880), (1856, 2688), (736, 736)])
def test_threads_decode_sampled_chunks_of_odd_sizes(dtype, gated, gate_up, n, k):
    codes, scales, _ = random_projection(n, k, seed=n)
    p = allocate(2, n, k, gated=gated, has_bias=False, device="cpu")
    pack_expert(p, 1, codes, scales, None, gated=gated, gate_up=gate_up, dtype=dtype, layer="l")
    dense = dequantize_mxfp4(codes, scales, torch.float32)
    by_place = {packed_row(row, n, gated, gate_up): row for row in range(n)}
    blocks, chunks = p.packed.shape[1:3]
    picks = random.Random(k).sample([(b, c) for b in range(blocks) for c in range(chunks)], 2)
    for block, chunk in [*picks, (blocks - 1, chunks - 1)]:
        for (place, column), value in decode_chunk(p.packed[1, block, chunk].tolist(), dtype).items():
            row, column = by_place.get((block, place)), chunk * 128 + column
            want = dense[row, column].item() if row is not None and column < k else 0.0
            assert value * p.row_scale[1, block * 64 + place].item() == want


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("gated", "gate_up"), ORDERS)
@pytest.mark.parametrize(("n", "k"), [(64, 128), (192, 96), (2880, 2880), (1856, 736), (736, 1856), (92, 2880)])
def test_round_trip_is_exact_and_padding_is_zero(dtype, gated, gate_up, n, k):
    codes, scales, bias = random_projection(n, k, seed=k)
    p = allocate(2, n, k, gated=gated, has_bias=True, device="cpu")
    untouched = [t[0].clone() for t in p.tensors]
    pack_expert(p, 1, codes, scales, bias, gated=gated, gate_up=gate_up, dtype=dtype, layer="l")
    dense = dequantize_mxfp4(codes, scales, torch.float32)
    if gate_up == "interleaved":
        dense, bias = to_halves(dense), to_halves(bias)
    weight, b = unpack_expert(p, 1, dtype=dtype, k=k, out_features=n, gated=gated)
    assert torch.equal(weight, dense)
    assert torch.equal(b, bias)
    assert all(torch.equal(t[0], old) for t, old in zip(p.tensors, untouched, strict=True))
    assert bool((p.row_scale == 1).all())  # scales of real checkpoints need no row scale
    rows, columns = p.packed.shape[1] * 64, p.packed.shape[2] * 128
    assert rows == padded_rows(n, gated)
    assert columns == padded_k(k)
    weight, b = unpack_expert(p, 1, dtype=dtype, k=columns, out_features=rows, gated=gated)
    assert weight.count_nonzero() == dense.count_nonzero()
    assert b.count_nonzero() == bias.count_nonzero()


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip_of_every_scale_in_float64(dtype):
    codes, scales = every_code_and_scale()
    p = allocate(1, 64, 128, gated=False, has_bias=False, device="cpu")
    pack_expert(p, 0, codes, scales, None, gated=False, dtype=dtype, layer="l")
    weight, _ = unpack_expert(p, 0, dtype=dtype, k=128, out_features=64, gated=False, out_dtype=torch.float64)
    assert torch.equal(weight, dequantize_mxfp4(codes, scales, torch.float64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_default_dtype_does_not_matter(dtype):
    """An engine loads weights under a bfloat16 default dtype."""
    codes, scales, bias = random_projection(96, 160, seed=1, low=106, high=130)
    results = []
    for default in (torch.float32, torch.bfloat16):
        for table in (code_layout._word_table, code_layout._shifts, code_layout._value_table, factor_table):
            table.cache_clear()
        try:
            torch.set_default_dtype(default)
            p = allocate(1, 96, 160, gated=True, has_bias=True, device="cpu")
            pack_expert(p, 0, codes, scales, bias, gated=True, dtype=dtype, layer="l")
            results.append([*p.tensors, *unpack_expert(p, 0, dtype=dtype, k=160, out_features=96, gated=True)])
        finally:
            torch.set_default_dtype(torch.float32)
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_padded_sizes():
    assert (padded_k(2880), padded_k(128), padded_k(736)) == (2944, 128, 768)
    assert padded_rows(2880, gated=False) == 2880
    assert padded_rows(2 * 2880, gated=True) == 2 * 2944
    assert padded_rows(1856, gated=False, pad_to=128) == 1920
    with pytest.raises(ValueError, match="gate as up"):
        padded_rows(65, gated=True)
    with pytest.raises(ValueError, match="multiple of 64"):
        padded_rows(64, gated=False, pad_to=32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
def test_an_expert_never_loaded_is_zero(dtype, gated):
    p = allocate(2, 96, 96, gated=gated, has_bias=True, device="cpu")
    weight, bias = unpack_expert(p, 1, dtype=dtype, k=128, out_features=p.row_scale.shape[1], gated=gated)
    assert weight.count_nonzero() == 0
    assert bias.count_nonzero() == 0
    assert all(value == 0 for value in decode_chunk(p.packed[1, 0, 0].tolist(), dtype).values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_scale_and_code_dtypes_load_alike(dtype):
    codes, scales, _ = random_projection(64, 128, seed=0, low=110, high=130)
    scales[0, 0] = 254 if dtype == torch.float16 else 127
    codes[0, 16:] = 0
    forms = [
        (codes, scales),
        (codes.view(torch.int8), scales.view(torch.float8_e8m0fnu)),
        (codes, scales.view(torch.float8_e8m0fnu).float()),
        (codes.T.contiguous().T, scales.T.contiguous().T),
    ]
    packed = []
    for c, s in forms:
        p = allocate(1, 64, 128, gated=False, has_bias=False, device="cpu")
        pack_expert(p, 0, c, s, None, gated=False, dtype=dtype, layer="l")
        packed.append(p)
    for p in packed[1:]:
        assert torch.equal(p.packed, packed[0].packed)
        assert torch.equal(p.row_scale, packed[0].row_scale)


def test_float32_scale_of_the_smallest_power():
    codes, scales = torch.full((64, 64), 0x22, dtype=torch.uint8), torch.zeros(64, 4, dtype=torch.uint8)
    p = allocate(1, 64, 128, gated=False, has_bias=False, device="cpu")
    smallest = torch.tensor(1 << 22, dtype=torch.int32).view(torch.float32).expand(64, 4)
    pack_expert(p, 0, codes, smallest, None, gated=False, dtype=torch.bfloat16, layer="l")
    q = allocate(1, 64, 128, gated=False, has_bias=False, device="cpu")
    pack_expert(q, 0, codes, scales, None, gated=False, dtype=torch.bfloat16, layer="l")
    assert torch.equal(p.packed, q.packed)


def refused(match, codes, scales, *, bias=None, has_bias=False, gated=False, dtype=torch.bfloat16, n=64, k=128):
    p = allocate(3, n, k, gated=gated, has_bias=has_bias, device="cpu")
    before = [None if t is None else t.clone() for t in p.tensors]
    with pytest.raises(ValueError, match=match) as error:
        pack_expert(p, 2, codes, scales, bias, gated=gated, dtype=dtype, layer="model.layers.3.experts", tensor="w13")
    assert "model.layers.3.experts: expert 2: w13" in str(error.value) or "activations must be" in str(error.value)
    for t, old in zip(p.tensors, before, strict=True):
        assert t is None or torch.equal(t, old)


@pytest.mark.parametrize("form", [torch.uint8, torch.float8_e8m0fnu])
def test_e8m0_nan_is_refused(form):
    codes, scales, _ = random_projection(64, 128, seed=0)
    codes[5] = 0  # even where it scales nothing
    scales[5, 2] = 255
    refused(r"row 5, group 2 is the e8m0 NaN \(255\)", codes, scales.view(form))


@pytest.mark.parametrize("bad", [0.0, -1.0, 1.5, math.nan, math.inf, 3e-39])
def test_float_scale_that_is_no_power_of_two_is_refused(bad):
    codes, _, _ = random_projection(64, 128, seed=0)
    scales = torch.ones(64, 4)
    scales[7, 1] = bad
    refused("powers of two.*row 7, group 1", codes, scales)


@pytest.mark.parametrize(("dtype", "span"), [(torch.bfloat16, 133), (torch.float16, 24)])
def test_row_window(dtype, span):
    codes = torch.full((64, 64), 0x11, dtype=torch.uint8)  # all 0.5, the smallest magnitude
    for top in (254, 128 + span // 2, span):
        scales = torch.full((64, 4), top, dtype=torch.uint8)
        scales[9, 3] = top - span
        p = allocate(1, 64, 128, gated=False, has_bias=False, device="cpu")
        pack_expert(p, 0, codes, scales, None, gated=False, dtype=dtype, layer="l")
        weight, _ = unpack_expert(p, 0, dtype=dtype, k=128, out_features=64, gated=False, out_dtype=torch.float64)
        assert torch.equal(weight, dequantize_mxfp4(codes, scales, torch.float64))
        assert min(decode_chunk(p.packed[0, 0, 0].tolist(), dtype).values()) > 0
    scales = torch.full((64, 4), 254, dtype=torch.uint8)
    scales[9, 3] = 254 - span - 1
    refused(
        f"row 9: scale exponents {126 - span}..127 span {span + 1}, more than the {span}", codes, scales, dtype=dtype
    )
    codes[9, 48:] = 0x80  # the offending group holds only zeros: nothing is lost
    p = allocate(1, 64, 128, gated=False, has_bias=False, device="cpu")
    pack_expert(p, 0, codes, scales, None, gated=False, dtype=dtype, layer="l")


def test_wrong_shapes_and_dtypes_are_refused():
    codes, scales, bias = random_projection(64, 128, seed=0)
    refused("codes must be uint8 or int8, found torch.int32", codes.int(), scales)
    refused("scales must be uint8, float8_e8m0fnu or float32, found torch.float16", codes, scales.half())
    refused(r"scales must be \(64, 4\), found \(64, 3\)", codes, scales[:, :3])
    refused("K a multiple of 32", codes[:, :60], scales)
    refused("K = 128", codes, scales, k=256)
    refused("rows, 1 to 64, and K in 32..128, found N = 128", codes.repeat(2, 1), scales.repeat(2, 1))
    refused("rows, 1 to 64, .* found N = 0, K = 128", codes[:0], scales[:0])
    refused("an even number of rows", codes[:63], scales[:63], gated=True)
    refused("bias is missing", codes, scales, has_bias=True)
    refused("bias is not expected", codes, scales, bias=bias)
    refused(r"bias must be \(64,\), found \(63,\)", codes, scales, bias=bias[:63], has_bias=True)
    refused("bfloat16 or torch.float16, found torch.float32", codes, scales, dtype=torch.float32)


@pytest.mark.parametrize("group_bytes", [8, 16])
@pytest.mark.parametrize("offset", [0, 3])
def test_live_groups_are_those_with_a_code_that_is_no_zero(group_bytes, offset):
    codes = torch.zeros(offset + 2 * 20 * group_bytes, dtype=torch.uint8)[offset:].view(2, 20, group_bytes)
    codes[0] = 0x88  # nothing but negative zeros
    for group in range(group_bytes):
        codes[1, group, group] = (0x01, 0x40, 0x83, 0xF8)[group % 4]
    found = weight_formats._live(codes)
    assert found.tolist() == [[False] * 20, [group < group_bytes for group in range(20)]]
