# SPDX-License-Identifier: Apache-2.0
"""Compiles `csrc/` ahead of time into the one library `vllm_humming/_kernels.so` (sm_90a, torch's stable ABI).

    python build_tools/kernels.py                 build in place, only what changed
    python build_tools/kernels.py --fetch-nvcc    first put nvcc from PyPI into build/cuda if the system has none
    python build_tools/kernels.py --check         say which nvcc and torch a build would use

Needs nvcc (CUDA 12.8 or newer), g++, ninja and torch's headers; neither a GPU nor a CUDA build of torch. torch is
never imported: its headers and `libtorch_cpu.so` are found on disk, so that pip's isolated environment can build too.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "csrc"
LIBRARY = ROOT / "vllm_humming" / "_kernels.so"
BUILD_DIR = ROOT / "build" / "kernels"
FETCHED_CUDA = ROOT / "build" / "cuda"

# What nvcc needs to compile and link, at the version torch's CUDA 13.0 builds use.
NVCC_PACKAGES = tuple(
    f"{name}==13.0.*"
    for name in ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime", "nvidia-cuda-cccl")
)
TORCH_REQUIREMENT = "torch>=2.11"
MIN_CUDA = (12, 8)
# Byte 7 is torch's major and byte 6 its minor version: the library uses nothing newer than torch 2.11's stable ABI.
TORCH_TARGET_VERSION = "0x020b000000000000"
SWITCH = "VLLM_HUMMING_BUILD_KERNELS"


class Unavailable(Exception):
    """The kernels cannot be built here; the message says what is missing and how to get it."""


@dataclass(frozen=True)
class Toolchain:
    """Everything a build takes from the machine."""

    nvcc: Path
    cuda: tuple[int, int]
    torch: Path  # the directory of the torch package
    ninja: Path
    cxx: Path


def site_dirs() -> list[Path]:
    """Import directories of this process and of the environment behind pip's build isolation."""
    dirs = [Path(p) for p in sys.path if p] + [Path(sysconfig.get_path(key)) for key in ("purelib", "platlib")]
    return list(dict.fromkeys(dirs))


def find_torch() -> Path | None:
    """Directory of a torch package whose stable-ABI headers are at least those of torch 2.11."""
    for site in site_dirs():
        torch = site / "torch"
        header = torch / "include" / "torch" / "headeronly" / "version.h"
        if not (header.is_file() and (torch / "include/torch/csrc/stable/library.h").is_file()):
            continue
        found = dict(re.findall(r"#define TORCH_VERSION_(MAJOR|MINOR) (\d+)", header.read_text()))
        if (int(found.get("MAJOR", 0)), int(found.get("MINOR", 0))) >= (2, 11):
            return torch
    return None


def _cuda_version(nvcc: Path) -> tuple[int, int] | None:
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"release (\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def find_nvcc() -> tuple[Path, tuple[int, int]] | None:
    """The first nvcc that is new enough: CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda, then PyPI's package."""
    candidates = [Path(os.environ[key]) / "bin/nvcc" for key in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(key)]
    on_path = shutil.which("nvcc")
    candidates += [Path(on_path)] if on_path else []
    candidates += [Path("/usr/local/cuda/bin/nvcc")]
    candidates += [site / "nvidia/cu13/bin/nvcc" for site in [FETCHED_CUDA, *site_dirs()]]
    for nvcc in candidates:
        version = _cuda_version(nvcc) if nvcc.is_file() else None
        if version is not None and version >= MIN_CUDA:
            return nvcc.absolute(), version
    return None


def find_ninja() -> Path | None:
    """ninja from PATH, beside this Python, or from the PyPI package (whose script pip's isolation puts on PATH)."""
    beside = Path(sys.executable).with_name("ninja")
    if beside.is_file():
        return beside
    found = shutil.which("ninja")
    if found:
        return Path(found)
    spec = importlib.util.find_spec("ninja")
    if spec is not None and spec.origin is not None:
        packaged = Path(spec.origin).parent / "data" / "bin" / "ninja"
        if packaged.is_file():
            return packaged
    return None


def toolchain() -> Toolchain:
    """What a build would use; raises Unavailable, naming everything that is missing."""
    nvcc, torch, ninja = find_nvcc(), find_torch(), find_ninja()
    cxx = shutil.which(os.environ.get("CXX", "g++"))
    missing = []
    if nvcc is None:
        version = ".".join(map(str, MIN_CUDA))
        missing.append(
            f"nvcc {version} or newer (install the CUDA toolkit and set CUDA_HOME, or run `make build`, or "
            f"`pip install {' '.join(repr(p) for p in NVCC_PACKAGES)}`)"
        )
    if torch is None:
        missing.append(f"torch's headers (`pip install '{TORCH_REQUIREMENT}'`; a CPU build of torch is enough)")
    if ninja is None:
        missing.append("ninja (`pip install ninja`)")
    if cxx is None:
        missing.append("a C++ compiler for nvcc's host code (g++, for example `apt-get install g++`)")
    if nvcc is None or torch is None or ninja is None or cxx is None:
        raise Unavailable("missing " + "; ".join(missing))
    return Toolchain(nvcc[0], nvcc[1], torch, ninja, Path(cxx))


def sources(directory: Path = SOURCES) -> list[Path]:
    """Translation units in `directory`, in a fixed order."""
    return sorted(p for p in directory.rglob("*") if p.suffix in (".cu", ".cpp"))


def has_driver() -> bool:
    """Whether an NVIDIA driver with at least one GPU runs here."""
    if Path("/proc/driver/nvidia/version").exists():
        return True
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


def wanted() -> bool:
    """Whether this machine should have the kernels: not switched off, and an nvcc or an NVIDIA driver is there."""
    switch = os.environ.get(SWITCH, "")
    if switch not in ("", "0", "1"):
        raise SystemExit(f"{SWITCH} is {switch!r}; it may be 0 (no kernels) or 1 (kernels or an error)")
    if switch:
        return switch == "1"
    return bool(sources()) and (find_nvcc() is not None or has_driver())


def _escape(path: object) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def ninja_file(tools: Toolchain, directory: Path, units: list[Path], library: Path, objects: Path) -> str:
    """The build as ninja text: one object a source file, header dependencies from nvcc, then one link."""
    root = tools.nvcc.resolve().parent.parent
    common = [
        "-O3",
        "-std=c++20",
        f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}",
        "-DUSE_CUDA",
        f"-I{directory}",
        f"-isystem {tools.torch / 'include'}",
    ]
    device = [
        f"-ccbin {tools.cxx}",
        "-gencode=arch=compute_90a,code=sm_90a",
        "--expt-relaxed-constexpr",
        "--threads=1",
        "-Xfatbin -compress-all",
        "-Xptxas -v",
        "-Xcompiler -fPIC,-fvisibility=hidden",
    ]
    # The torch symbols come from libtorch_cpu, which `import torch` has loaded by then; no search path is recorded.
    link = [
        f"-ccbin {tools.cxx}",
        "-shared",
        "-cudart static",
        f"-L{root / 'lib64'} -L{root / 'lib'}",
        "-Xlinker --exclude-libs=ALL -Xlinker --no-as-needed",
        f"-L{tools.torch / 'lib'} -ltorch_cpu",
    ]
    lines = [
        "ninja_required_version = 1.5",
        f"nvcc = {_escape(tools.nvcc)}",
        f"flags = {' '.join(common + device)}",
        f"link = {' '.join(link)}",
        # .cpp files go through nvcc too: it adds CUDA's include paths and hands them to the host compiler.
        "rule compile",
        "  command = $nvcc $flags -MD -MF $out.d -c $in -o $out > $out.log 2>&1 || (cat $out.log; exit 1)",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = nvcc $in",
        "rule link",
        "  command = $nvcc -o $out $in $link",
        "  description = link $out",
    ]
    outputs = []
    for unit in units:
        output = objects / (unit.name + ".o")
        outputs.append(_escape(output))
        lines.append(f"build {outputs[-1]}: compile {_escape(unit)}")
    lines.append(f"build {_escape(library)}: link {' '.join(outputs)}")
    return "\n".join(lines) + "\n"


def build(library: Path = LIBRARY, directory: Path = SOURCES, objects: Path = BUILD_DIR) -> Path:
    """Compiles every unit of `directory` into `library` and returns it.

    Incremental: a file is compiled again when it, a header it includes or the command line changed. Raises
    Unavailable where a tool is missing or there is nothing to compile, CalledProcessError where a compile fails.
    """
    units = sources(directory)
    if not units:
        raise Unavailable(f"no sources in {directory}")
    names = [unit.name for unit in units]
    if len(set(names)) != len(names):
        raise ValueError(f"two files in {directory} share a name: {sorted(n for n in names if names.count(n) > 1)}")
    tools = toolchain()
    objects.mkdir(parents=True, exist_ok=True)
    script = objects / "build.ninja"
    script.write_text(ninja_file(tools, directory, units, library, objects))
    jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
    # On failure ninja has printed the compiler's words; they go to the caller's own output.
    subprocess.run([tools.ninja, "-C", objects, "-f", script, "-j", jobs], check=True)
    return library


def fetch_nvcc() -> None:
    """Puts PyPI's nvcc into build/cuda where no usable nvcc is installed. Raises CalledProcessError if pip fails."""
    if find_nvcc() is not None:
        return
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(FETCHED_CUDA)]
    subprocess.run([*command, *NVCC_PACKAGES], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the CUDA kernels in place.")
    parser.add_argument("--fetch-nvcc", action="store_true", help="get nvcc from PyPI if none is installed")
    parser.add_argument("--check", action="store_true", help="report the tools, build nothing")
    args = parser.parse_args()
    if args.fetch_nvcc:
        fetch_nvcc()
    try:
        if args.check:
            print(toolchain())
        else:
            print(build())
    except Unavailable as error:
        raise SystemExit(f"vllm-humming: kernels not built: {error}") from error
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"vllm-humming: kernels not built: {error.cmd[0]} failed, see its output above") from error


if __name__ == "__main__":
    main()
