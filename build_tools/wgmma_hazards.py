# SPDX-License-Identifier: Apache-2.0
"""Looks in machine code for registers of a running wgmma that something touches before the wgmma's wait.

A wgmma reads its A registers and writes its accumulators until a wait has retired its group. ptxas keeps other
instructions off them within a basic block; across branches it was seen to overwrite A registers of a wgmma in flight,
without a warning, which gives wrong numbers now and then.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

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


# A wgmma group's A registers and accumulators.
_Group = tuple[frozenset[int], frozenset[int]]
_MOST_GROUPS = 8  # no wait leaves more in flight
_NONE: _Group = (frozenset(), frozenset())


@dataclass(frozen=True)
class _Flight:
    """Groups of wgmmas in flight, oldest first, and the one that no commit has closed yet."""

    groups: tuple[_Group, ...] = ()
    open: _Group = _NONE

    def issue(self, operand: frozenset[int], accumulators: frozenset[int], commit: bool) -> _Flight:
        group = (self.open[0] | operand, self.open[1] | accumulators)
        if not commit:
            return _Flight(self.groups, group)
        groups = (*self.groups, group)
        if len(groups) > _MOST_GROUPS:  # as in a loop without a wait: the oldest two as one
            groups = ((groups[0][0] | groups[1][0], groups[0][1] | groups[1][1]), *groups[2:])
        return _Flight(groups)

    def wait(self, pending: int) -> _Flight:
        return _Flight(self.groups[max(0, len(self.groups) - pending) :], self.open)

    def clash(self, writes: frozenset[int], touches: frozenset[int]) -> int | None:
        """A register of a running wgmma among A registers written or accumulators touched, if there is one."""
        for operand, accumulators in (*self.groups, self.open):
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
    """One line a hazard in the output of `cuobjdump -sass`, by kernel and address.

    Follows both ways of every branch, with what is in flight there.
    """
    found = []
    for name, instructions in _functions(sass).items():
        hazards: dict[int, str] = {}
        at = {instruction.address: i for i, instruction in enumerate(instructions)}
        work, seen = [(0, _Flight())], set()
        while work:
            i, flight = work.pop()
            while i < len(instructions) and (i, flight) not in seen:
                seen.add((i, flight))
                instruction = instructions[i]
                register, flight = _step(flight, instruction)
                if register is not None:
                    what = f"{instruction.address:#06x}: {instruction.opcode} {instruction.operands}"
                    hazards[instruction.address] = f"{name}: R{register} belongs to a wgmma in flight at {what}"
                target = _target(instruction)
                if target in at:
                    work.append((at[target], flight))
                if _ends(instruction):
                    break
                i += 1
        found += [hazards[address] for address in sorted(hazards)]
    return found


def _step(flight: _Flight, instruction: _Instruction) -> tuple[int | None, _Flight]:
    """(a register that `instruction` must not have touched, what is in flight after it)."""
    if match := _WGMMA.match(instruction.opcode):
        names = [part.strip() for part in instruction.operands.split(",")]
        accumulators = _from(names[0], int(match[1]) // 2)
        operand = _from(names[1], 4) if names[1].startswith("R") else frozenset()
        # wgmmas on the same accumulators run one after the other
        register = flight.clash(accumulators, operand)
        return register, flight.issue(operand, accumulators, "gsb0" in names)
    if instruction.opcode.startswith("WARPGROUP.DEPBAR"):
        return None, flight.wait(int(instruction.operands.split(",")[1], 16))
    return flight.clash(frozenset(instruction.writes()), frozenset(instruction.touches())), flight


def _target(instruction: _Instruction) -> int:
    """Where a branch or call may go on, or -1."""
    if not instruction.opcode.startswith(("BRA", "CALL")):
        return -1
    match = re.search(r"0x([0-9a-f]+)", instruction.operands)
    return int(match[1], 16) if match else -1


def _ends(instruction: _Instruction) -> bool:
    """Whether nothing goes on behind `instruction`."""
    always = instruction.predicate is None and not re.match(r"!?U?P\d", instruction.operands)
    return always and (instruction.opcode in ("BRA", "EXIT") or instruction.opcode.startswith("RET"))
