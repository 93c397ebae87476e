# SPDX-License-Identifier: Apache-2.0
"""FP4 mixture-of-experts kernels for NVIDIA Hopper, as a vLLM plugin."""

__version__ = "0.1.0"


def register() -> None:
    """Entry point of the `vllm.general_plugins` group; see vllm_humming.plugin.register."""
    from vllm_humming.plugin import register as register_plugin

    register_plugin()
