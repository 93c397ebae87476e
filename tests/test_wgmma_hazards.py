# SPDX-License-Identifier: Apache-2.0
"""The search for registers of a wgmma in flight, on machine code written here as cuobjdump prints it."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "build_tools"))
import wgmma_hazards

# Accumulators R24 to R31, A in R32 to R35.
ISSUE = "QGMMA.64x16x32.F32.E4M3.E4M3 R24, R32, gdesc[UR12], RZ, !UPT, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
WAIT_FOR_ALL_BUT_ONE = "WARPGROUP.DEPBAR.LE gsb0, 0x1"


def sass(*instructions, name="kernel"):
    """Instruction n at address 16 n, each followed by a line with the other half of its encoding."""
    lines = ["\tcode for sm_90a", f"\t\tFunction : {name}", "\t.headerflags @EF_CUDA_SM90"]
    for n, text in enumerate(instructions):
        lines += [f"        /*{16 * n:04x}*/                   {text} ;    /* 0x0000000000077210 */"]
        lines += [" " * 70 + "/* 0x004fca0007ffe0ff */"]
    return "\n".join([*lines, "\t\t..........", ""])


def touched(*instructions):
    """(register, address) of what is found in one kernel."""
    found = [line.split() for line in wgmma_hazards.problems(sass(*instructions))]
    return [(words[1], int(words[9].rstrip(":"), 16)) for words in found]


def test_a_clean_kernel():
    """A registers may be read while the tensor cores read them; after the wait everything is free."""
    assert not touched(
        "LDS.128 R32, [R2]",
        "MOV R24, RZ",
        "WARPGROUP.ARRIVE",
        ISSUE,
        "LOP3.LUT R5, R32, 0x77777777, RZ, 0xc0, !PT",
        "LDS.128 R36, [R2+0x80]",
        "STS [R4], R23",
        WAIT,
        "FFMA R40, R24, R5, R40",
        "MOV R32, R36",
        "@P0 BRA 0x0010",
        "EXIT",
    )


def test_the_line_names_kernel_register_and_instruction():
    text = sass(ISSUE, WAIT, "EXIT", name="clean") + sass("S2R R0, SR_TID.X", ISSUE, "PRMT R35, R6, R7, R8", name="bad")
    assert wgmma_hazards.problems(text) == [
        "bad: R35 belongs to a wgmma in flight at 0x0020: PRMT R35, R6, R7, R8",
    ]


@pytest.mark.parametrize(
    ("instruction", "register"),
    [
        ("MOV R32, R7", "R32"),
        ("@!P2 MOV R35, R7", "R35"),
        ("MOV R36, R7", None),
        ("FADD R5, R24, R6", "R24"),
        ("FADD R5, R6, R31.reuse", "R31"),
        ("STS [R2], R30", "R30"),
        ("MOV R31, R6", "R31"),
        ("FADD R5, R23, R6", None),
        ("HGMMA.64x8x16.F32 R24, R40, gdesc[UR8], R24, gsb0", None),  # the tensor cores run in order
    ],
)
def test_registers_of_one_wgmma(instruction, register):
    assert touched(ISSUE, instruction, WAIT) == ([(register, 0x10)] if register else [])


# A in R43 to R46.
@pytest.mark.parametrize(
    ("instruction", "hazard"),
    [
        ("LDS R42, [R2]", False),
        ("LDS.64 R42, [R2]", True),
        ("LDS.64 R40, [R2]", False),
        ("LDS.128 R40, [R2]", True),
        ("LDS.128 R36, [R2]", False),
        ("LDG.E.128.STRONG.GPU R40, desc[UR4][R2.64]", True),
        ("LDSM.16.M88.2 R42, [R2]", True),
        ("LDSM.16.M88.4 R40, [R2]", True),
        ("IMAD.WIDE R42, R3, 0x10, R6", True),
        ("CS2R R42, SRZ", True),
        ("CS2R.32 R42, SRZ", False),
        ("HMMA.16816.F32.BF16 R40, R4, R8, R12", True),
        ("SHFL.IDX PT, R43, R6, RZ, 0x1f", True),
        ("ATOMG.E.ADD.STRONG.GPU PT, R43, desc[UR4][R2.64], R5", True),
        ("FCHK P0, R43, R6", False),
        ("STS.128 [R43], R4", False),
    ],
)
def test_how_many_registers_an_instruction_writes(instruction, hazard):
    issue = "QGMMA.64x16x32.F32.E4M3.E4M3 R24, R43, gdesc[UR12], RZ, !UPT, gsb0"
    assert touched(issue, instruction, WAIT) == ([("R43", 0x10)] if hazard else [])


def test_a_from_shared_memory_has_no_registers():
    issue = "HGMMA.64x16x16.F32 R24, gdesc[UR8], RZ, !UPT, gsb0"
    assert not touched(issue, "MOV R32, R7", WAIT)
    assert touched(issue, "MOV R26, R7", WAIT) == [("R26", 0x10)]


def test_a_forward_branch_does_not_end_a_flight():
    assert touched(ISSUE, "@P0 BRA 0x0030", "IADD3 R4, R4, 0x1, RZ", "MOV R33, R7", WAIT) == [("R33", 0x30)]


@pytest.mark.parametrize("end", ["BRA 0x0040", "EXIT"])
def test_code_behind_an_unconditional_branch_is_reached_from_elsewhere(end):
    assert not touched(ISSUE, end, "MOV R33, R7", WAIT, "EXIT")
    assert touched(ISSUE, f"@P1 {end}", "MOV R33, R7", WAIT, "EXIT") == [("R33", 0x20)]


def test_steps_of_a_group():
    """Only a group's last wgmma names gsb0; the registers of all of them are taken, before it too."""
    first = ISSUE.removesuffix(", gsb0")
    last = "QGMMA.64x16x32.F32.E4M3.E4M3 R24, R36, gdesc[UR12], R24, gsb0"
    assert touched(first, "MOV R33, R7", last, WAIT) == [("R33", 0x10)]
    assert touched(first, last, "MOV R33, R7", WAIT) == [("R33", 0x20)]
    assert touched(first, last, "MOV R37, R7", WAIT) == [("R37", 0x20)]
    assert not touched(first, last, WAIT, "MOV R33, R7", "MOV R37, R7")
    older = ISSUE.replace("R32", "R40")
    assert touched(older, first, last, WAIT_FOR_ALL_BUT_ONE, "MOV R41, R7", "MOV R33, R7", WAIT) == [("R33", 0x50)]


def test_a_wait_with_one_group_pending_frees_the_older_one():
    newer = "QGMMA.64x16x32.F32.E4M3.E4M3 R40, R36, gdesc[UR12], RZ, !UPT, gsb0"
    assert touched(ISSUE, newer, "MOV R33, R7", WAIT) == [("R33", 0x20)]
    assert not touched(ISSUE, newer, WAIT_FOR_ALL_BUT_ONE, "MOV R33, R7", "FADD R5, R24, R6", WAIT)
    assert touched(ISSUE, newer, WAIT_FOR_ALL_BUT_ONE, "MOV R37, R7", WAIT) == [("R37", 0x30)]
    assert touched(ISSUE, newer, WAIT_FOR_ALL_BUT_ONE, "FADD R5, R40, R6", WAIT) == [("R40", 0x30)]


def test_a_wait_for_fewer_groups_than_are_in_flight_frees_none():
    newer = "QGMMA.64x16x32.F32.E4M3.E4M3 R40, R36, gdesc[UR12], RZ, !UPT, gsb0"
    assert touched(ISSUE, newer, "WARPGROUP.DEPBAR.LE gsb0, 0x3", "MOV R33, R7", WAIT) == [("R33", 0x30)]


@pytest.mark.parametrize(
    "end",
    [("@P0 BRA 0x0010", WAIT), ("@P0 BRA 0x0060", "BRA 0x0010", WAIT)],
    ids=["conditional", "unconditional"],
)
def test_a_loop_whose_start_touches_what_its_end_issued(end):
    body = ("MOV R33, R7", "IADD3 R4, R4, 0x1, RZ")
    assert touched("MOV R4, RZ", *body, ISSUE, *end) == [("R33", 0x10)]
    assert not touched("MOV R4, RZ", *body, ISSUE, WAIT, *end)
    assert not touched("MOV R4, RZ", WAIT, *body, ISSUE, *end)  # a wait at the loop's start


def test_one_line_an_instruction():
    stretch = (ISSUE, "MOV R33, R7", "MOV R34, R7", WAIT)
    assert touched(*stretch, *stretch) == [("R33", 0x10), ("R34", 0x20), ("R33", 0x50), ("R34", 0x60)]


def test_both_ways_of_a_branch_are_followed():
    # the way past the wait, and a block behind an exit that is only branched to
    assert touched(ISSUE, "@P0 BRA 0x30", WAIT, "MOV R33, R7") == [("R33", 0x30)]
    assert touched(ISSUE, "@P0 BRA 0x40", WAIT, "EXIT", "MOV R33, R7") == [("R33", 0x40)]


def test_a_loop_without_a_wait_ends_the_search():
    other = ISSUE.replace("R32", "R40")
    assert touched(ISSUE, other, "@P0 BRA 0x0", "MOV R41, R7", WAIT) == [("R41", 0x30)]


def test_a_wgmma_may_not_write_another_ones_operands():
    second = ISSUE.replace("R24", "R32").replace("R32,", "R32, ", 1).replace("R32, gdesc", "R60, gdesc")
    assert [register for register, _ in touched(ISSUE, second, WAIT)] == ["R32"]
