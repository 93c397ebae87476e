# SPDX-License-Identifier: Apache-2.0
"""Random weights of this package's kernels, made on the GPU directly in packed form."""

import torch

from vllm_humming.moe.packing import CODE_BYTES, PackedProjection, allocate
from vllm_humming.moe.weight_formats import WEIGHT_FORMATS

# Scale bytes of small groups (2^-10..2^-6), so that a layer's output stays finite.
SCALE_BYTES = {
    ("mxfp4", torch.bfloat16): (243, 248),
    ("mxfp4", torch.float16): (19, 24),
    ("nvfp4", torch.bfloat16): (160, 192),  # times 2^-9, by the row scale below
    ("nvfp4", torch.float16): (160, 192),
    ("mxfp4_fp8", torch.bfloat16): (0, 5),  # times 8 below: 2^-5..2^-1 before the row scale
    ("mxfp4_fp8", torch.float16): (0, 5),
}
SCALE_STEP = {"mxfp4": 1, "nvfp4": 1, "mxfp4_fp8": 8}
ROW_SCALE = {"mxfp4": 1.0, "nvfp4": 2.0**-2, "mxfp4_fp8": 2.0**-5}


def random_projection(
    experts: int,
    n: int,
    k: int,
    fmt: str,
    dtype: torch.dtype = torch.bfloat16,
    *,
    gated: bool = False,
    pad_rows_to: int | None = None,
    device: str = "cuda",
) -> PackedProjection:
    """Random codes and scales of [experts, n, k] for activations of dtype, without biases."""
    packed = allocate(
        experts, n, k, gated=gated, has_bias=False, device=device, pad_rows_to=pad_rows_to,
        weight_format=WEIGHT_FORMATS[fmt],
    )  # fmt: skip
    packed.packed.random_(0, 256)
    packed.packed[..., CODE_BYTES:].random_(*SCALE_BYTES[fmt, dtype]).mul_(SCALE_STEP[fmt])
    packed.row_scale.fill_(ROW_SCALE[fmt])
    return packed
