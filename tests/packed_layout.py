# SPDX-License-Identifier: Apache-2.0
"""The packed container read as the notes describe it, bit by bit and without the package's own code."""

import struct

import torch

DTYPES = [torch.bfloat16, torch.float16]
ORDERS = [(False, "packed"), (True, "packed"), (True, "interleaved")]

# fragment -> places of its bits in a 16-bit lane: mantissa, low and high exponent bit, sign (the table in the notes)
BITS = {
    torch.bfloat16: [(6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (13, 14, 10, 11)],
    torch.float16: [(9, 10, 11, 15), (6, 7, 8, 12), (3, 4, 5, 14), (0, 1, 2, 13)],
}


def bits_to_float(bits, dtype):
    if dtype == torch.bfloat16:
        return struct.unpack("<f", struct.pack("<I", bits << 16))[0]
    return struct.unpack("<e", struct.pack("<H", bits))[0]


def words_of(chunk):
    """(half_k, w, g, q, index, word) of each of a chunk's 1024 words: warp w, lane 4 g + q, the thread's word index."""
    for half_k in range(2):
        for thread in range(128):
            w, lane = divmod(thread, 32)
            for index in range(4):
                start = 4 * (half_k * 512 + thread * 4 + index)
                yield half_k, w, *divmod(lane, 4), index, int.from_bytes(chunk[start : start + 4], "little")


def decode_chunk(chunk, dtype, factor_of):
    """What the 128 threads of a warpgroup make of one chunk: {(packed row, k): value without the row scale}.

    factor_of(row, k): the format's factor, row = (w * 8 + g) * 2 + half, the order of the rows' scales in the chunk.
    """
    weights = {}
    for half_k, w, g, q, step, word in words_of(chunk):
        for fragment, (*magnitude, sign) in enumerate(BITS[dtype]):
            half, k_high = fragment & 1, fragment >> 1
            for odd in range(2):
                lane16 = (word >> (16 * odd)) & 0xFFFF
                top = 6 if dtype == torch.bfloat16 else 9  # two exponent bits, one mantissa bit
                bits = ((lane16 >> sign) & 1) << 15
                for i, place in enumerate(magnitude):
                    bits |= ((lane16 >> place) & 1) << (top + i)
                k = half_k * 64 + step * 16 + k_high * 8 + 2 * q + odd
                value = bits_to_float(bits, dtype) * factor_of((w * 8 + g) * 2 + half, k)
                # the kernel multiplies in dtype: the product must be exact there
                assert torch.tensor(value, dtype=torch.float64).to(dtype).double().item() == value
                weights[16 * w + 8 * half + g, k] = value
    return weights


def packed_row(row, n, gated, gate_up):
    """(block, row in the block) of a checkpoint row."""
    if not gated:
        return divmod(row, 64)
    half, channel = (row % 2, row // 2) if gate_up == "interleaved" else divmod(row, n // 2)
    block, rest = divmod(channel, 32)
    w, g = divmod(rest, 8)
    return block, 16 * w + 8 * half + g


E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist()


def decode_e4m3_chunk(chunk):
    """What the 128 threads make of one chunk for FP8 activations: {(packed row, k): e4m3 value}."""
    weights = {}
    for half_k, w, g, q, index, word in words_of(chunk):
        step, row_half = divmod(index, 2)
        for high in range(2):
            for i in range(4):
                magnitude = word >> (16 * high + 4 * i) & 7
                sign = word >> (8 * i + (3 if high else 7)) & 1
                k = 32 * q + 8 * (2 * half_k + step) + 4 * high + i
                scale = chunk[4096 + ((w * 8 + g) * 2 + row_half) * 4 + k // 32]
                assert scale in range(0, 89, 8)
                # e2m1 at 2^-5: exponent and mantissa move up, and 0.5 becomes the smallest normal number
                byte = 0 if magnitude == 0 else 8 if magnitude == 1 else (magnitude << 2) + 8
                byte = (byte + scale if byte else 0) | sign << 7
                weights[16 * w + 8 * row_half + g, k] = E4M3[byte]
    return weights
