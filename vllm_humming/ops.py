# SPDX-License-Identifier: Apache-2.0
"""The `vllm_humming` operators: schemas, CPU implementations, fakes, and the loader of the compiled kernels.

Importing this module needs torch only. `torch.ops.vllm_humming.moe` runs the reference on CPU tensors; on CUDA tensors
it runs the kernels after `load_kernels()`, and before that raises the message that says what is missing.
"""

from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from vllm_humming.moe import reference
from vllm_humming.moe.codes import CHUNK_K
from vllm_humming.moe.packing import PackedProjection
from vllm_humming.moe.weight_formats import BY_CODE, WeightFormat

LIBRARY_PATH = Path(__file__).with_name("_kernels.so")

_SCHEMAS = {
    "moe": "(Tensor x, Tensor topk_weights, Tensor topk_ids, Tensor? expert_map, "
    "Tensor w13, Tensor w13_row_scale, Tensor? w13_bias, Tensor w2, Tensor w2_row_scale, Tensor? w2_bias, "
    "Tensor(a!) workspace, Tensor(b!) out, int weight_format, int activation, float alpha, float beta, float limit, "
    "bool router_weight_on_input, int tile1, int tile2) -> ()",
    "moe_workspace_bytes": "(int tokens, int top_k, int num_experts, int hidden, int intermediate_padded, "
    "int weight_format) -> int",
    "gemm_plain": "(Tensor x, Tensor packed, Tensor row_scale, Tensor? bias, Tensor(a!) out, int weight_format, "
    "int tile) -> ()",
    "tile_field": "(int tile, int field) -> int",
}
_KERNEL_OPS = ("moe", "gemm_plain")

_definitions = torch.library.Library("vllm_humming", "DEF")
_placeholders: torch.library.Library | None = None
_lock = Lock()
_loaded = False


def kernels_available() -> bool:
    """Whether the compiled kernels are installed next to this module (they may still fail to load)."""
    return LIBRARY_PATH.is_file()


def load_kernels() -> None:
    """Loads the compiled kernels once per process; later calls return at once.

    Raises RuntimeError that says what to install or rebuild when the library is missing or does not load.
    """
    global _loaded
    with _lock:
        if _loaded:
            return
        if not kernels_available():
            raise RuntimeError(_missing_message())
        dropped = _drop_placeholders()
        try:
            torch.ops.load_library(str(LIBRARY_PATH))
        except OSError as error:
            if dropped:
                _add_placeholders()
            raise RuntimeError(
                f"the vllm-humming kernels in {LIBRARY_PATH} do not load with torch {torch.__version__}: {error}. "
                "They need torch 2.11 or later with CUDA; rebuild them by reinstalling vllm-humming in this environment"
            ) from error
        _loaded = True


def _missing_message() -> str:
    return (
        f"the vllm-humming kernels are not installed ({LIBRARY_PATH} is missing): this installation was built without "
        "nvcc. Install the CUDA toolkit, 12.8 or later and of a major version that the driver supports, then reinstall "
        "vllm-humming; `pip install .` takes nvcc 13.0 from PyPI where there is a driver and no toolkit"
    )


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_projection(
    name: str, weight_format: WeightFormat, packed: Tensor, row_scale: Tensor, bias: Tensor | None
) -> PackedProjection:
    size = weight_format.chunk_bytes
    _check(
        packed.dtype == torch.uint8 and packed.dim() == 4 and packed.shape[3] == size,
        f"{name} must be uint8 [E, rows/64, K/128, {size}] ({weight_format.label}), "
        f"found {packed.dtype} {tuple(packed.shape)}",
    )
    rows = (packed.shape[0], packed.shape[1] * 64)
    for label, t in (("row_scale", row_scale), ("bias", bias)):
        if t is not None:
            _check(
                t.dtype == torch.float32 and tuple(t.shape) == rows,
                f"{name} {label} must be float32 {rows}, found {t.dtype} {tuple(t.shape)}",
            )
    return PackedProjection(packed, row_scale, bias, weight_format)


def _check_format(weight_format: int) -> WeightFormat:
    known = {code: fmt.name for code, fmt in BY_CODE.items()}
    _check(weight_format in known, f"weight_format must be one of {known}, found {weight_format}")
    return BY_CODE[weight_format]


def _moe_cpu(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    w13: Tensor,
    w13_row_scale: Tensor,
    w13_bias: Tensor | None,
    w2: Tensor,
    w2_row_scale: Tensor,
    w2_bias: Tensor | None,
    workspace: Tensor,
    out: Tensor,
    weight_format: int,
    activation: int,
    alpha: float,
    beta: float,
    limit: float,
    router_weight_on_input: bool,
    tile1: int,
    tile2: int,
) -> None:
    fmt = _check_format(weight_format)
    first = _check_projection("w13", fmt, w13, w13_row_scale, w13_bias)
    second = _check_projection("w2", fmt, w2, w2_row_scale, w2_bias)
    _check(activation in tuple(reference.Activation), f"activation must be 0, 1 or 2, found {activation}")
    intermediate = w2.shape[2] * CHUNK_K
    rows = intermediate * (2 if reference.Activation(activation).gated else 1)
    hidden = x.shape[1]
    _check(
        x.dtype in (torch.bfloat16, torch.float16) and out.dtype == x.dtype and out.shape == x.shape,
        f"x and out must be [M, H] of one dtype, bfloat16 or float16, found {x.dtype} {tuple(x.shape)} and "
        f"{out.dtype} {tuple(out.shape)}",
    )
    _check(
        w13.shape[0] == w2.shape[0] and w13.shape[1] * 64 == rows,
        f"w13 must have {rows} rows for {w2.shape[0]} experts (w2 has K = {intermediate}), found {tuple(w13.shape)}",
    )
    _check(
        w13.shape[2] * CHUNK_K - CHUNK_K < hidden <= w13.shape[2] * CHUNK_K and hidden <= w2.shape[1] * 64,
        f"x has H = {hidden}, which does not belong to w13 {tuple(w13.shape)} and w2 {tuple(w2.shape)}",
    )
    _check(
        topk_ids.shape == topk_weights.shape and topk_ids.dim() == 2 and topk_ids.shape[0] == x.shape[0],
        f"topk_ids and topk_weights must be [{x.shape[0]}, k], found {tuple(topk_ids.shape)} and "
        f"{tuple(topk_weights.shape)}",
    )
    reference.moe(
        x,
        topk_weights,
        topk_ids,
        expert_map,
        first,
        second,
        out,
        activation=activation,
        alpha=alpha,
        beta=beta,
        limit=limit,
        router_weight_on_input=router_weight_on_input,
    )


def _gemm_plain_cpu(
    x: Tensor, packed: Tensor, row_scale: Tensor, bias: Tensor | None, out: Tensor, weight_format: int, tile: int
) -> None:
    weights = _check_projection("packed", _check_format(weight_format), packed, row_scale, bias)
    _check(
        x.dtype == out.dtype and x.shape[0] == out.shape[0] and packed.shape[0] == 1,
        f"x [M, K], out [M, N] and one expert expected, found {tuple(x.shape)}, {tuple(out.shape)} and "
        f"{packed.shape[0]} experts",
    )
    reference.gemm_plain(x, weights, out)


def _writes_in_place(*args: object) -> None:
    """The fake of an op that only writes its mutable arguments."""


def _refuse(*args: object) -> None:
    raise RuntimeError(
        "the vllm-humming kernels are not loaded: call vllm_humming.ops.load_kernels() first"
        if kernels_available()
        else _missing_message()
    )


def _no_workspace(
    tokens: int, top_k: int, num_experts: int, hidden: int, intermediate_padded: int, weight_format: int
) -> int:
    return 0  # the CPU implementation takes its scratch from torch


def _add_placeholders() -> None:
    """What the compiled library replaces: no workspace, and a clear refusal of CUDA tensors."""
    global _placeholders
    _placeholders = torch.library.Library("vllm_humming", "IMPL")
    _placeholders.impl("moe_workspace_bytes", _no_workspace, "CompositeExplicitAutograd")
    for name in _KERNEL_OPS:
        _placeholders.impl(name, _refuse, "CUDA")


def _drop_placeholders() -> bool:
    """Whether there were any."""
    global _placeholders
    if _placeholders is None:
        return False
    _placeholders._destroy()
    _placeholders = None
    return True


for _name, _schema in _SCHEMAS.items():
    _definitions.define(_name + _schema)
_definitions.impl("moe", _moe_cpu, "CPU")
_definitions.impl("gemm_plain", _gemm_plain_cpu, "CPU")
for _name in _KERNEL_OPS:
    torch.library.register_fake(f"vllm_humming::{_name}", _writes_in_place, lib=_definitions)
_add_placeholders()
