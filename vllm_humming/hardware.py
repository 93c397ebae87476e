# SPDX-License-Identifier: Apache-2.0
"""Says what this machine can run, before any weight is loaded."""

from typing import Literal

from vllm_humming.compat import Platform, platform
from vllm_humming.options import HummingOptions

Backend = Literal["kernel", "reference"]

SM90 = (9, 0)


def check_platform(found: Platform | None = None) -> None:
    """Raises RuntimeError on a machine that no backend of this plugin serves.

    Served: CUDA GPUs of compute capability 9.0 (H100, H200, GH200), vLLM's CPU engine, and a machine on which vLLM
    finds no device at all (where layers can be built and tested, but no engine starts).
    """
    found = found or platform()
    if found.kind in ("cpu", "none"):
        return
    if found.kind != "cuda":
        raise RuntimeError(
            "vllm-humming runs on NVIDIA GPUs of compute capability 9.0 and on vLLM's CPU engine, "
            f"found platform {found.kind!r}; leave out --quantization humming here"
        )
    # None: the driver tells nothing in this process; the worker's check on the real device decides.
    if found.capability is not None and found.capability != SM90:
        major, minor = found.capability
        raise RuntimeError(
            "vllm-humming's kernels need a GPU of compute capability 9.0 (H100, H200, GH200), "
            f"found {found.device_name} with {major}.{minor}; leave out --quantization humming here"
        )


def resolve_backend(options: HummingOptions, found: Platform | None = None) -> Backend:
    """The backend that options.backend means on this machine; loads the compiled kernels when they are it.

    Raises RuntimeError when the machine is not served (see check_platform), when the kernels are asked for without a
    GPU, or when they are not installed; the message says what to install.
    """
    found = found or platform()
    check_platform(found)
    if found.kind != "cuda":
        if options.backend == "kernel":
            raise RuntimeError(
                'additional_config["humming"]["backend"] is "kernel", but vLLM runs without a GPU here; '
                'use "auto" or "reference"'
            )
        return "reference"
    if options.backend == "reference":
        return "reference"
    from vllm_humming import ops

    ops.load_kernels()
    return "kernel"
