# SPDX-License-Identifier: Apache-2.0
"""The plugin's options: `--additional-config '{"humming": {...}}'`.

They live in VllmConfig.additional_config, so they reach every worker with the engine's own configuration.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

SECTION = "humming"


@dataclass(frozen=True)
class HummingOptions:
    """backend: which implementation runs the experts; "auto" is the kernels on an SM90 GPU, the reference on a CPU.
    online_format: what an unquantised checkpoint's experts are quantised to while loading. activation: what the experts
    compute with; "auto" is FP8 where the checkpoint says so, else the model's own 16 bits. linears: whose kernels run
    FP4 linears outside the experts, vLLM's or this package's.
    """

    backend: str = field(default="auto", metadata={"choices": ("auto", "kernel", "reference")})
    online_format: str = field(default="mxfp4", metadata={"choices": ("mxfp4", "nvfp4")})
    activation: str = field(default="auto", metadata={"choices": ("auto", "16bit", "fp8")})
    linears: str = field(default="vllm", metadata={"choices": ("vllm", "humming")})

    @classmethod
    def parse(cls, additional_config: Any) -> "HummingOptions":
        """Reads the "humming" section of additional_config.

        Raises ValueError for a section that is no mapping, an unknown option or an unknown value, listing valid ones.
        """
        section = additional_config.get(SECTION, {}) if isinstance(additional_config, Mapping) else {}
        if not isinstance(section, Mapping):
            raise ValueError(f'additional_config["{SECTION}"] must be a mapping of options, found {section!r}')
        choices = {option.name: option.metadata["choices"] for option in fields(cls)}
        for name, value in section.items():
            if name not in choices:
                raise ValueError(
                    f'unknown option {name!r} in additional_config["{SECTION}"]; valid options: {_listed(choices)}'
                )
            if value not in choices[name]:
                raise ValueError(
                    f'additional_config["{SECTION}"]["{name}"] is {value!r}; valid values: {_listed(choices[name])}'
                )
        return cls(**section)

    @classmethod
    def current(cls) -> "HummingOptions":
        """The options of the engine whose layers are being built."""
        from vllm_humming import compat

        return cls.parse(compat.additional_config())


def _listed(names: Any) -> str:
    return ", ".join(repr(name) for name in names)
