# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint tensor must be, whichever layer it belongs to. `where` starts the message of every ValueError."""

import math

import torch
from torch import Tensor

from vllm_humming.moe.scales import global_scale_fault
from vllm_humming.moe.weight_formats import WeightFormat
from vllm_humming.quant_methods.schemes import TensorKind

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_DTYPES = {"codes": (torch.uint8, torch.int8), "dense": _FLOATS, "bias": _FLOATS, "global": _FLOATS}
_LISTED = 8  # missing tensors named in one error


def per_element(kind: TensorKind, fmt: WeightFormat) -> int:
    """Elements of K that one stored element of a matrix covers."""
    return {"codes": 2, "scales": fmt.group_k, "dense": 1}[kind]


def check_shape(where: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != expected:
        raise ValueError(f"{where} must have shape {expected}, found {tuple(tensor.shape)}")


def check_dtype(where: str, kind: TensorKind, tensor: Tensor, fmt: WeightFormat) -> None:
    dtypes = _DTYPES.get(kind, fmt.scale_dtypes)
    if tensor.dtype not in dtypes:
        raise ValueError(f"{where} must be {' or '.join(str(dtype) for dtype in dtypes)}, found {tensor.dtype}")


def check_bias(where: str, bias: Tensor) -> None:
    if not bool(bias.isfinite().all()):
        raise ValueError(f"{where} holds NaN or infinity")


def global_factors(where: str, stored: Tensor, *, reciprocal: bool) -> Tensor:
    """Stored global scales -> fp32 [values], what a weight is to be multiplied by; positive and finite ones only."""
    values = stored.detach().float().reshape(-1)
    for value in values.tolist():  # one or two, which most often are on the host
        if not 0 < value < math.inf:
            raise ValueError(f"{where} {global_scale_fault(value)}")
    return values.reciprocal() if reciprocal else values


def check_nothing_missing(layer: str, missing: list[str], owner: str) -> None:
    """Raises for a layer whose checkpoint lacks the tensors of these names. owner: whose they are."""
    if missing:
        rest = f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
        count = "1 tensor" if len(missing) == 1 else f"{len(missing)} tensors"
        raise ValueError(
            f"{layer}: the checkpoint lacks {count} of {owner}: {', '.join(missing[:_LISTED])}{rest}. Check that every "
            "file of the checkpoint is there and complete"
        )
