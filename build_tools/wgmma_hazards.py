# SPDX-License-Identifier: Apache-2.0
"""Looks in machine code for registers of a running wgmma that something touches before the wgmma's wait.

A wgmma reads its A registers and writes its accumulators until a wait has retired its group. ptxas keeps other
instructions off them within a basic block; across branches it was seen to overwrite A registers of a wgmma in flight,
without a warning, which gives wrong numbers now and then.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][A-Za-z0-9_.]*)\s*([^;]*);")
_WGMMA = re.compile(r"^[HQI]GMMA\.64x(\d+)x\d+")
_REGISTER = re.compile(r"\bR(\d+)\b")


@dataclass(frozen=True)
class _Instruction:
    address: int
    predicate: str | None
    opcode: str
    operands: str

    def writes(self) -> set[int]:
        """Registers that this instruction, no wgmma, writes."""
        first, _, rest = self.operands.partition(",")
        if self.opcode.startswith(("SHFL", "ATOM")) and "P" in first:  # a predicate comes first
            first = rest.partition(",")[0]
        match = re.fullmatch(r"\s*R(\d+)(?:\.reuse)?\s*", first)
        if match is None:
            return set()
        name = self.opcode
        count = 1
        if ".128" in name or name.startswith(("HMMA", "LDSM.16.M88.4")):
            count = 4
        elif ".64" in name or ".WIDE" in name or name.startswith(("CS2R", "LDSM.16.M88.2")):
            count = 1 if name.startswith("CS2R.32") else 2
        return set(range(int(match[1]), int(match[1]) + count))

    def touches(self) -> set[int]:
        return self.writes() | {int(r) for r in _REGISTER.findall(self.operands)}


@dataclass
class _Flight:
    """Groups of wgmmas in flight, oldest first: (A registers, accumulators) each; the last one may still be open."""

    groups: list[tuple[frozenset[int], frozenset[int]]] = field(default_factory=list)
    open: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())

    def copy(self) -> _Flight:
        return _Flight(list(self.groups), self.open)

    def issue(self, instruction: _Instruction, width: int) -> None:
        names = [part.strip() for part in instruction.operands.split(",")]
        accumulators = _from(names[0], width // 2)
        operand = _from(names[1], 4) if names[1].startswith("R") else frozenset()
        self.open = (self.open[0] | operand, self.open[1] | accumulators)
        if "gsb0" in names:
            self.groups.append(self.open)
            self.open = (frozenset(), frozenset())

    def wait(self, pending: int) -> None:
        self.groups = self.groups[max(0, len(self.groups) - pending) :]

    def hazard(self, instruction: _Instruction) -> int | None:
        """A register that `instruction` must not touch yet, if there is one."""
        writes, touches = instruction.writes(), instruction.touches()
        for operand, accumulators in [*self.groups, self.open]:
            bad = (writes & operand) | (touches & accumulators)
            if bad:
                return min(bad)
        return None


def _from(name: str, count: int) -> frozenset[int]:
    match = re.match(r"R(\d+)", name)
    return frozenset(range(int(match[1]), int(match[1]) + count)) if match else frozenset()


def _functions(sass: str) -> dict[str, list[_Instruction]]:
    found: dict[str, list[_Instruction]] = {}
    current: list[_Instruction] = []
    for line in sass.splitlines():
        if "Function : " in line:
            current = found.setdefault(line.split("Function : ")[1].strip(), [])
        elif match := _LINE.match(line):
            current.append(_Instruction(int(match[1], 16), match[2], match[3], match[4].strip()))
    return found


def problems(sass: str) -> list[str]:
    """One line a hazard in the output of `cuobjdump -sass`; the first of each kernel and stretch between waits.

    Code is read in order of address, each loop's start once more with what its end leaves in flight.
    """
    found = []
    for name, instructions in _functions(sass).items():
        at = {instruction.address: i for i, instruction in enumerate(instructions)}
        flight = _Flight()
        for i, instruction in enumerate(instructions):
            target = _back_edge(instruction)
            # Before the step: an unconditional branch ends the stretch.
            again = flight.copy() if target in at else _Flight()
            hazard = _step(flight, instruction)
            if hazard is None and again.groups:
                for later in instructions[at[target] : i + 1]:
                    if later.opcode.startswith("WARPGROUP.DEPBAR"):
                        break
                    hazard = hazard or _step(again, later)
            if hazard is not None:
                found.append(f"{name}: {hazard}")
                flight = _Flight()
    return found


def _step(flight: _Flight, instruction: _Instruction) -> str | None:
    """Lets `instruction` run; what it must not have touched, if anything."""
    if match := _WGMMA.match(instruction.opcode):
        flight.issue(instruction, int(match[1]))
        return None
    if instruction.opcode.startswith("WARPGROUP.DEPBAR"):
        flight.wait(int(instruction.operands.split(",")[1], 16))
        return None
    register = flight.hazard(instruction)
    if instruction.predicate is None and instruction.opcode in ("BRA", "EXIT"):
        flight.groups, flight.open = [], (frozenset(), frozenset())  # what follows is reached from elsewhere
    if register is None:
        return None
    where = f"{instruction.address:#06x}: {instruction.opcode} {instruction.operands}"
    return f"R{register} belongs to a wgmma in flight at {where}"


def _back_edge(instruction: _Instruction) -> int:
    """The target of a branch to an earlier address, or -1."""
    if not instruction.opcode.startswith("BRA"):
        return -1
    match = re.search(r"0x([0-9a-f]+)", instruction.operands)
    target = int(match[1], 16) if match else -1
    return target if 0 <= target < instruction.address else -1
