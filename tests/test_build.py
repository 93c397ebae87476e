# SPDX-License-Identifier: Apache-2.0
"""The kernel build: what it needs, what it makes, and an install without kernels."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "build_tools"))
sys.path.insert(0, str(ROOT / "scripts"))
import environment  # noqa: E402

import kernels  # noqa: E402

HEADER = "#pragma once\n#include <cuda_runtime.h>\nvoid scale(float* x, int n, cudaStream_t stream);\n"
KERNEL = """#include "scale.h"
__global__ void scale_kernel(float* x, int n) {
  asm volatile("wgmma.fence.sync.aligned;");  // only sm_90a has it
  if (threadIdx.x < n) x[threadIdx.x] *= 2.f;
}
void scale(float* x, int n, cudaStream_t stream) { scale_kernel<<<1, 128, 0, stream>>>(x, n); }
"""
OPERATOR = """#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include "scale.h"
void scale_op(torch::stable::Tensor x) { scale(static_cast<float*>(x.mutable_data_ptr()), x.numel(), nullptr); }
STABLE_TORCH_LIBRARY(vllm_humming_build_test, m) { m.def("scale(Tensor(a!) x) -> ()"); }
STABLE_TORCH_LIBRARY_IMPL(vllm_humming_build_test, CUDA, m) { m.impl("scale", TORCH_BOX(&scale_op)); }
"""


def can_build() -> bool:
    try:
        kernels.toolchain()
    except kernels.Unavailable:
        return False
    return True


@pytest.mark.skipif(not can_build(), reason="no nvcc, g++, ninja or torch headers here")
def test_a_build_loads_without_a_gpu_and_compiles_only_what_changed(tmp_path):
    sources, objects, library = tmp_path / "csrc", tmp_path / "objects", tmp_path / "_kernels.so"
    sources.mkdir()
    for name, text in (("scale.h", HEADER), ("scale.cu", KERNEL), ("ops.cpp", OPERATOR)):
        (sources / name).write_text(text)
    assert kernels.build(library, sources, objects) == library
    torch.ops.load_library(str(library))
    assert torch.ops.vllm_humming_build_test.scale.default is not None

    def times() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in objects.glob("*.o")}

    first = times()
    assert set(first) == {"scale.cu.o", "ops.cpp.o"}
    kernels.build(library, sources, objects)
    assert times() == first
    (sources / "scale.cu").write_text(KERNEL + "// changed\n")
    kernels.build(library, sources, objects)
    changed = times()
    assert changed["scale.cu.o"] > first["scale.cu.o"]
    assert changed["ops.cpp.o"] == first["ops.cpp.o"]
    (sources / "scale.h").write_text(HEADER + "// changed\n")
    kernels.build(library, sources, objects)
    assert all(times()[name] > changed[name] for name in changed)


@pytest.mark.skipif(not can_build(), reason="no nvcc, g++, ninja or torch headers here")
def test_a_source_that_does_not_compile_fails_the_build(tmp_path, capfd):
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "wrong.cu").write_text("__global__ void k() { undeclared(); }\n")
    with pytest.raises(subprocess.CalledProcessError):
        kernels.build(tmp_path / "_kernels.so", tmp_path / "csrc", tmp_path / "objects")
    assert "undeclared" in capfd.readouterr().out


def test_missing_tools_are_all_named_with_what_to_install(monkeypatch):
    monkeypatch.setattr(kernels, "find_nvcc", lambda: None)
    monkeypatch.setattr(kernels, "find_torch", lambda: None)
    with pytest.raises(kernels.Unavailable, match=r"nvcc 12\.8 or newer .*nvidia-cuda-nvcc==13\.0.*torch>=2\.11"):
        kernels.toolchain()


@pytest.fixture
def machine(monkeypatch):
    """Sets what the build finds on the machine: machine(nvcc=..., torch=..., driver=...)."""
    monkeypatch.delenv(kernels.SWITCH, raising=False)

    def configure(*, nvcc: bool, torch: bool, driver: bool) -> None:
        monkeypatch.setattr(kernels, "find_nvcc", lambda: (Path("nvcc"), (13, 0)) if nvcc else None)
        monkeypatch.setattr(kernels, "find_torch", lambda: Path("torch") if torch else None)
        monkeypatch.setattr(kernels, "sources", lambda: [Path("kernel.cu")])
        monkeypatch.setattr(kernels, "has_driver", lambda: driver)

    return configure


def test_build_requirements_follow_the_machine(machine, monkeypatch):
    backend = pytest.importorskip("backend")
    machine(nvcc=False, torch=False, driver=False)
    assert backend.get_requires_for_build_wheel() == []
    machine(nvcc=True, torch=True, driver=False)
    assert backend.get_requires_for_build_wheel() == ["ninja"]
    machine(nvcc=False, torch=False, driver=True)
    assert backend.get_requires_for_build_wheel() == ["ninja", *kernels.NVCC_PACKAGES, "torch>=2.11"]
    monkeypatch.setenv(kernels.SWITCH, "0")
    assert backend.get_requires_for_build_wheel() == []


def test_an_old_nvcc_is_passed_over(tmp_path, monkeypatch):
    for name, release in (("old", "12.4"), ("new", "13.0")):
        nvcc = tmp_path / name / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
        nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "old"))
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "new"))
    assert kernels.find_nvcc() == (tmp_path / "new" / "bin" / "nvcc", (13, 0))


def test_an_install_without_kernels_succeeds_and_says_so_once(tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    for name in ("setup.py", "pyproject.toml", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, project)
    (project / "README.md").write_text("readme\n")
    shutil.copytree(ROOT / "build_tools", project / "build_tools", ignore=shutil.ignore_patterns("__pycache__"))
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "vllm_humming", project / "vllm_humming", ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation", "-w", tmp_path, project]
    done = subprocess.run(command, env=os.environ | {kernels.SWITCH: "0"}, capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    assert text.count("installing without CUDA kernels") == 1
    assert f"{kernels.SWITCH}=0" in text
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == "vllm_humming-0.1.0-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    assert "vllm_humming/moe/packing.py" in names
    assert {name.split("/")[0] for name in names} == {"vllm_humming", "vllm_humming-0.1.0.dist-info"}
    entry_points = zipfile.ZipFile(wheel).read("vllm_humming-0.1.0.dist-info/entry_points.txt").decode()
    assert "[vllm.general_plugins]\nvllm_humming = vllm_humming:register" in entry_points


@pytest.mark.parametrize(("arguments", "fetches"), [(["cpu"], []), (["cpu", "--kernels"], [False]), (["cuda"], [True])])
def test_a_cpu_environment_builds_kernels_only_when_asked(arguments, fetches, tmp_path, monkeypatch, capsys):
    """make demo and make lint need no kernels on a CPU, so no compiler can make them fail there."""
    asked = []
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment.venv, "create", lambda directory, **kwargs: directory.mkdir(parents=True))
    monkeypatch.setattr(environment, "pip", lambda *args, **kwargs: None)
    monkeypatch.setattr(environment, "install_cpu_engine", lambda python, requirement: None)
    monkeypatch.setattr(environment, "build_kernels", lambda python, fetch: asked.append(fetch))
    monkeypatch.setattr(sys, "argv", ["environment.py", *arguments])
    environment.main()
    assert asked == fetches
    assert capsys.readouterr().out == f"{tmp_path / '.venv' / arguments[0] / 'bin' / 'python'}\n"
