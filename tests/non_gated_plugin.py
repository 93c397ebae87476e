# SPDX-License-Identifier: Apache-2.0
"""A vLLM plugin for one engine test: lets the CPU engine build non-gated experts, which vLLM restricts to GPUs.

The restriction is a check of the platform when the layer's config is made; nothing else there depends on it.
"""


def register() -> None:
    import vllm.model_executor.layers.fused_moe.config as moe_config

    real = moe_config.current_platform

    class Gpu:
        def is_cuda_alike(self) -> bool:
            return True

        def __getattr__(self, name: str):
            return getattr(real, name)

    if type(real).__name__ != "Gpu":
        moe_config.current_platform = Gpu()
