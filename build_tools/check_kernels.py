# SPDX-License-Identifier: Apache-2.0
"""Checks what the compiler made of `csrc/`: no spills, no stack frames, no serialized wgmma, tensor-core instructions.

    python build_tools/check_kernels.py

Reads the ptxas reports that build_tools/kernels.py leaves in build/kernels and prints one line a kernel: registers and
static shared memory (dynamic shared memory is chosen at launch and not in the reports). Where a cuobjdump is found
(CUDA_HOME, PATH, /usr/local/cuda, triton's wheel) the machine code is checked too: HGMMA or QGMMA in every GEMM kernel
wide enough for wgmma, LDL and STL in none, and no register of a wgmma in flight touched before its wait (the compiler
sees to that only within a basic block; build_tools/wgmma_hazards.py). Exits with 1 if a check fails, or if there is no
report of a source to check.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import kernels
import wgmma_hazards

_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_FUNCTION = re.compile(r"Function properties for (\w+)")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
# wgmma serialized, setmaxnreg ignored and the like
_ADVICE = re.compile(r"\(C75\d\d\)|Potential Performance Loss")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)")
# A GEMM kernel's tile configuration in its mangled name: Widths<...>, stages, CTAs, producer warps, narrow.
_TILE = re.compile(r"6WidthsIJ((?:Li\d+E)+)EE+Li\d+ELi\d+ELi\d+ELi(\d+)E")


@dataclass
class Kernel:
    """One kernel in a ptxas report. name: mangled. shared: static shared memory, bytes."""

    name: str
    registers: int | None = None
    shared: int = 0


@dataclass
class Report:
    """What the ptxas output of one source says."""

    kernels: list[Kernel] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def parse_report(text: str) -> Report:
    """Kernels and problems in one source's `ptxas -v` output; a kernel without its numbers is a problem too."""
    report = Report()
    function, framed = "", set()
    for line in text.splitlines():
        if match := _ENTRY.search(line):
            report.kernels.append(Kernel(match[1]))
        elif match := _FUNCTION.search(line):
            function = match[1]
        elif match := _FRAME.search(line):
            framed.add(function)
            for size, what in zip(match.groups(), ("stack frame", "spill stores", "spill loads"), strict=True):
                if int(size):
                    report.problems.append(f"{function}: {size} bytes {what}")
        elif _ADVICE.search(line):
            report.problems.append(line.removeprefix("ptxas info").lstrip(" :"))
        elif (match := _USED.search(line)) and report.kernels:
            shared = _SHARED.search(line)
            report.kernels[-1].registers = int(match[1])
            report.kernels[-1].shared = int(shared[1]) if shared else 0
    for kernel in report.kernels:
        if kernel.registers is None or kernel.name not in framed:
            report.problems.append(f"{kernel.name}: the report lacks its registers or its stack frame")
    return report


def opcodes(sass: str) -> dict[str, set[str]]:
    """kernel (mangled) -> its opcodes without modifiers, from `cuobjdump -sass`."""
    found: dict[str, set[str]] = {}
    current: set[str] = set()
    for line in sass.splitlines():
        if "Function : " in line:
            current = found.setdefault(line.split("Function : ")[1].strip(), set())
        elif match := _INSTRUCTION.match(line):
            current.add(match[1])
    return found


def uses_wgmma(name: str) -> bool:
    """Whether `name` (mangled) is a GEMM kernel with a token width beyond those that mma.sync computes.

    Raises ValueError for a tile configuration of another form than csrc/moe/tile.cuh had: update the pattern here.
    """
    if "PairConfig" in name:
        return True
    match = _TILE.search(name)
    if match is None:
        if "TileConfig" in name:
            raise ValueError(f"{name}: the widths of its TileConfig are not where check_kernels.py looks for them")
        return False
    return max(map(int, re.findall(r"\d+", match[1]))) > int(match[2])


def check_opcodes(names: Iterable[str], found: dict[str, set[str]]) -> list[str]:
    """Problems in the machine code of the kernels `names` (mangled) of one object."""
    problems = []
    for name in names:
        used = found.get(name)
        if not used:
            problems.append(f"{name}: no machine code in the object; build again")
            continue
        problems += [f"{name}: {opcode} in the machine code" for opcode in ("LDL", "STL") if opcode in used]
        if uses_wgmma(name) and not used & {"HGMMA", "QGMMA"}:
            problems.append(f"{name}: no HGMMA or QGMMA in the machine code")
    return problems


def find_cuobjdump() -> Path | None:
    """A cuobjdump from CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda or triton's wheel."""
    candidates = [Path(os.environ[key]) / "bin/cuobjdump" for key in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(key)]
    on_path = shutil.which("cuobjdump")
    candidates += [Path(on_path)] if on_path else []
    candidates += [Path("/usr/local/cuda/bin/cuobjdump")]
    candidates += [site / "triton/backends/nvidia/bin/cuobjdump" for site in kernels.site_dirs()]
    return next((path for path in candidates if path.is_file()), None)


def readable(names: list[str]) -> dict[str, str]:
    """Mangled -> short readable names, by c++filt; the mangled names where there is none."""
    if not names or shutil.which("c++filt") is None:
        return {name: name for name in names}
    text = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    short = [re.sub(r"^void |\(anonymous namespace\)::|vllm_humming::", "", line) for line in text.splitlines()]
    return {name: re.sub(r"\([^()]*\)$", "", line) for name, line in zip(names, short, strict=True)}


def check_source(source: Path, objects: Path, cuobjdump: Path | None) -> Report:
    """The report of one source of csrc by its log in `objects`, with the problems of its object's machine code."""
    output = objects / (source.name + ".o")
    log = output.with_name(output.name + ".log")
    if not (log.is_file() and output.is_file()):
        return Report(problems=[f"no object or {log.name} in {objects}; run `make build`"])
    report = parse_report(log.read_text())
    if source.suffix == ".cu" and not report.kernels:
        report.problems.append(f"no kernel in {log}; delete it and {output.name} and run `make build`")
    if cuobjdump is not None and report.kernels:
        dump = subprocess.run([cuobjdump, "-sass", output], capture_output=True, text=True)
        if dump.returncode:
            report.problems.append(f"{cuobjdump} failed: {dump.stderr.strip()}")
        else:
            report.problems += check_opcodes([kernel.name for kernel in report.kernels], opcodes(dump.stdout))
            report.problems += wgmma_hazards.problems(dump.stdout)
    return report


def main() -> int:
    cuobjdump = find_cuobjdump()
    count, problems = 0, []
    for source in kernels.sources():
        report = check_source(source, kernels.BUILD_DIR, cuobjdump)
        short = readable([kernel.name for kernel in report.kernels])
        for kernel in report.kernels:
            registers = f"{kernel.registers} registers"
            print(f"{source.stem:<14} {registers:>13} {kernel.shared:>6} B static shared  {short[kernel.name]}")
        count += len(report.kernels)
        problems += [f"{source.name}: {problem}" for problem in report.problems]
    if not count:
        problems.append(f"no kernel in {kernels.BUILD_DIR}; run `make build`")
    code = f"machine code read by {cuobjdump}" if cuobjdump else "machine code not checked: no cuobjdump found"
    print(f"kernels: {count}, problems: {len(problems)}; {code}")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
