# SPDX-License-Identifier: Apache-2.0
"""PEP 517 backend: setuptools, plus the build requirements that depend on the machine.

A machine that is to have the kernels (it has nvcc or an NVIDIA driver) also gets ninja and, where they are missing,
nvcc and torch in pip's build environment. Any other machine needs setuptools alone.
"""

from __future__ import annotations

from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

import kernels

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def get_requires_for_build_wheel(config_settings: dict[str, object] | None = None) -> list[str]:
    if not kernels.wanted():
        return []
    requirements = ["ninja"]
    if kernels.find_nvcc() is None:
        requirements += kernels.NVCC_PACKAGES
    if kernels.find_torch() is None:
        requirements.append(kernels.TORCH_REQUIREMENT)
    return requirements


get_requires_for_build_editable = get_requires_for_build_wheel
