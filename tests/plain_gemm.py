# SPDX-License-Identifier: Apache-2.0
"""One expert's projection through grouped_gemm."""

import torch
from torch import Tensor

from vllm_humming.moe.layouts import GemmLayout
from vllm_humming.moe.packing import PackedProjection


def plain_gemm(x: Tensor, p: PackedProjection, out: Tensor, tile: int = 0) -> None:
    """out [M, N] = x [M, K] times the one expert of p, plus its bias."""
    code = p.weight_format.code
    size = torch.ops.vllm_humming.grouped_gemm_workspace_bytes(len(x), 1, x.shape[1], code, GemmLayout.CONTIGUOUS)
    workspace = torch.empty(size, dtype=torch.uint8, device=x.device)
    torch.ops.vllm_humming.grouped_gemm(
        x, None, *p.tensors, None, None, workspace, out, GemmLayout.CONTIGUOUS, code, tile
    )
