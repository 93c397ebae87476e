# SPDX-License-Identifier: Apache-2.0
"""Adds the CUDA kernels to the setuptools build (`build_tools/kernels.py` compiles them)."""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).resolve().parent / "build_tools"))
import kernels


class BuildKernels(build_ext):
    """Builds the plain library `_kernels.so`: it holds operators, no Python module, so it carries no ABI suffix."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).absolute()
        target.parent.mkdir(parents=True, exist_ok=True)
        self.copy_file(str(kernels.build(kernels.BUILD_DIR / "_kernels.so")), str(target))


class PlatformWheel(bdist_wheel):
    """One wheel serves every Python 3: nothing in it is built against Python's ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


def extensions() -> list[Extension]:
    """The kernels where this machine can build them; else none, and one line that says so."""
    if os.environ.get(kernels.SWITCH) == "1":
        kernels.toolchain()  # asked for: what is missing is an error
    elif not kernels.wanted():
        reason = f"{kernels.SWITCH}=0" if os.environ.get(kernels.SWITCH) == "0" else "neither nvcc nor a driver here"
        return without_kernels(reason)
    else:
        try:
            kernels.toolchain()
        except kernels.Unavailable as error:
            return without_kernels(str(error))
    return [Extension("vllm_humming._kernels", sources=[])]


def without_kernels(reason: str) -> list[Extension]:
    # setup.py runs once for each step of an install; only the step that builds speaks.
    if any(command in sys.argv for command in ("bdist_wheel", "editable_wheel", "install", "develop", "build_ext")):
        print(
            f"vllm-humming: installing without CUDA kernels: {reason}. CPU engines work; to serve on a GPU, "
            "provide what is missing and install again.",
            file=sys.stderr,
        )
    return []


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel})
