# SPDX-License-Identifier: Apache-2.0
"""The `vllm_humming` operators: schemas, fakes, and the loader of the compiled kernels.

Importing this module needs torch only. The operators run the reference on CPU tensors (cpu_ops.py); on CUDA tensors
they run the kernels after `load_kernels()`, and before that raise the message that says what is missing.

moe: the routed-experts layer. moe_batched: the same experts on tokens that lie by expert already, x and out [E, max, H]
with counts int32 [E], without router weights and sum. grouped_gemm: one projection without activation; `layout` is a
moe.layouts.GemmLayout, which has the shapes. pack_rows: one expert's checkpoint bytes into the kernels'
layout, and what is wrong with them into a record, as moe.packing.pack_rows does it; dtype 0 is bfloat16 and 1 float16.

x of moe_batched and grouped_gemm is bf16 or fp16, of out's dtype; with `weight_format` 2 (FP8 tokens) any of the two,
or float8_e4m3fn in natural K order with x_scale fp32 [.., rows, ceil(K / 128)] (contiguous, or as
moe.layouts.scales_m_major). K and N may be smaller than the packed sizes, K by less than 128, in multiples of 8.
Rows that belong to no expert keep what they hold in out. Workspaces are uint8 of the sizes that *_workspace_bytes give;
one that is large enough may serve every call on a stream. What ids, groups, counts and rows hold is read on the device,
so a captured graph may be replayed with other values; they must be in range, which the CPU checks and the kernels do
not. `tile` indexes moe.schedule.TILES and must be of the format's path. Weights are read while the kernel ahead in the
stream still runs, if that lets its dependents start early (programmatic dependent launch): such a kernel must not have
written them.
"""

from pathlib import Path
from threading import Lock

import torch

from vllm_humming import cpu_ops

LIBRARY_PATH = Path(__file__).with_name("_kernels.so")

_SCHEMAS = {
    "moe": "(Tensor x, Tensor topk_weights, Tensor topk_ids, Tensor? expert_map, "
    "Tensor w13, Tensor w13_row_scale, Tensor? w13_bias, Tensor w2, Tensor w2_row_scale, Tensor? w2_bias, "
    "Tensor(a!) workspace, Tensor(b!) out, int weight_format, int activation, float alpha, float beta, float limit, "
    "bool router_weight_on_input, int tile1, int tile2) -> ()",
    "moe_workspace_bytes": "(int tokens, int top_k, int num_experts, int hidden, int intermediate_padded, "
    "int weight_format) -> int",
    "moe_batched": "(Tensor x, Tensor? x_scale, Tensor counts, "
    "Tensor w13, Tensor w13_row_scale, Tensor? w13_bias, Tensor w2, Tensor w2_row_scale, Tensor? w2_bias, "
    "Tensor(a!) workspace, Tensor(b!) out, int weight_format, int activation, float alpha, float beta, float limit, "
    "int tile1, int tile2) -> ()",
    "moe_batched_workspace_bytes": "(int max_tokens, int num_experts, int hidden, int intermediate_padded, "
    "int weight_format) -> int",
    "grouped_gemm": "(Tensor x, Tensor? x_scale, Tensor packed, Tensor row_scale, Tensor? bias, Tensor? groups, "
    "Tensor? rows, Tensor(a!) workspace, Tensor(b!) out, int layout, int weight_format, int tile) -> ()",
    "grouped_gemm_workspace_bytes": "(int rows, int num_experts, int k, int weight_format, int layout) -> int",
    "pack_rows": "(Tensor codes, Tensor scales, Tensor? global_scale, Tensor? bias, Tensor(a!) row_scale, "
    "Tensor(b!) packed, Tensor(c!) packed_row_scale, Tensor(d!)? packed_bias, Tensor(e!) record, int weight_format, "
    "int dtype, bool gated, bool interleaved, int zero_group) -> ()",
    "tile_field": "(int tile, int field) -> int",
}
_CPU_OPS = {
    "moe": cpu_ops.moe,
    "moe_batched": cpu_ops.moe_batched,
    "grouped_gemm": cpu_ops.grouped_gemm,
    "pack_rows": cpu_ops.pack_rows,
}

_definitions = torch.library.Library("vllm_humming", "DEF")
_placeholders: torch.library.Library | None = None
_lock = Lock()
_loaded = False


def kernels_loaded() -> bool:
    """Whether load_kernels() has loaded the compiled kernels in this process."""
    return _loaded


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


def _writes_in_place(*args: object) -> None:
    """The fake of an op that only writes its mutable arguments."""


def _refuse(*args: object) -> None:
    raise RuntimeError(
        "the vllm-humming kernels are not loaded: call vllm_humming.ops.load_kernels() first"
        if kernels_available()
        else _missing_message()
    )


def _no_workspace(*sizes: int) -> int:
    return 0  # the CPU implementations take their scratch from torch


def _add_placeholders() -> None:
    """What the compiled library replaces: no workspace, and a clear refusal of CUDA tensors."""
    global _placeholders
    _placeholders = torch.library.Library("vllm_humming", "IMPL")
    for name in _CPU_OPS:
        if (workspace := f"{name}_workspace_bytes") in _SCHEMAS:
            _placeholders.impl(workspace, _no_workspace, "CompositeExplicitAutograd")
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
for _name, _implementation in _CPU_OPS.items():
    _definitions.impl(_name, _implementation, "CPU")
    torch.library.register_fake(f"vllm_humming::{_name}", _writes_in_place, lib=_definitions)
_add_placeholders()
