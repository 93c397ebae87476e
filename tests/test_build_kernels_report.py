# SPDX-License-Identifier: Apache-2.0
"""The check of compiler reports and machine code, on small ones written here."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "build_tools"))
import check_kernels  # noqa: E402
import kernels  # noqa: E402

ROUTE = "_ZN12vllm_humming5routeENS_11RouteParamsE"
# Widths 32, 64; by mma.sync up to none, and up to 64.
GEMM = (
    "_ZN12vllm_humming4gemm6kernelI6__halfNS_10TileConfigILi2ELi2ENS_6WidthsIJLi32ELi64EEEELi4ELi1ELi4ELi{}E"
    "LNS_6TokensE0EEELNS_5StageE1EEEvNS_10GemmParamsE"
)
WIDE, NARROW = GEMM.format(0), GEMM.format(64)
CLEAN = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
SERIALIZED = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
    f"insufficient register resources for the wgmma pipeline in the function '{WIDE}'\n"
)


def ptxas(name, frame=CLEAN, used="Used 168 registers, used 3 barriers"):
    return (
        f"ptxas info    : Compiling entry function '{name}' for 'sm_90a'\n"
        f"ptxas info    : Function properties for {name}\n"
        f"    {frame}\n"
        f"ptxas info    : {used}\n"
        "ptxas info    : Compile time = 535.008 ms\n"
    )


def sass(name, *instructions):
    """As cuobjdump prints it: an offset, the instruction and its encoding."""
    lines = [f"        /*{16 * n:04x}*/    {text} ;    /* 0x00000a00ff017b82 */" for n, text in enumerate(instructions)]
    return "\n".join(["\tcode for sm_90a", f"\t\tFunction : {name}", "\t.headerflags @EF_CUDA_SM90", *lines, ""])


def test_a_clean_report():
    text = "ptxas info    : 0 bytes gmem\n" + ptxas(WIDE)
    text += ptxas(ROUTE, used="Used 40 registers, used 1 barriers, 37252 bytes smem, 16 bytes cmem[2]")
    report = check_kernels.parse_report(text)
    assert report.problems == []
    assert report.kernels == [check_kernels.Kernel(WIDE, 168, 0), check_kernels.Kernel(ROUTE, 40, 37252)]


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (ptxas(ROUTE, CLEAN.replace("0 bytes stack", "64 bytes stack")), [f"{ROUTE}: 64 bytes stack frame"]),
        (
            ptxas(ROUTE, "0 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads"),
            [f"{ROUTE}: 8 bytes spill stores", f"{ROUTE}: 12 bytes spill loads"],
        ),
        (SERIALIZED + ptxas(WIDE), [SERIALIZED.removeprefix("ptxas info    : ").strip()]),
        (
            f"ptxas info    : Compiling entry function '{ROUTE}' for 'sm_90a'\n" + ptxas(WIDE),
            [f"{ROUTE}: the report lacks its registers or its stack frame"],
        ),
    ],
    ids=["stack", "spills", "serialized", "cut short"],
)
def test_a_bad_report(text, problems):
    assert check_kernels.parse_report(text).problems == problems


def test_a_spill_in_a_function_that_was_not_inlined_counts():
    text = (
        ptxas(WIDE)
        + f"ptxas info    : Function properties for helper\n    {CLEAN.replace('0 bytes stack', '8 bytes stack')}\n"
    )
    assert check_kernels.parse_report(text).problems == ["helper: 8 bytes stack frame"]


def test_machine_code():
    text = sass(
        WIDE, "LDC R1, c[0x0][0x28]", "@!P0 HGMMA.64x96x16.F32 R24, R4, gdesc[UR8], R24", "@P1 LDGSTS.E [R2], [R4]"
    )
    text += sass(NARROW, "HMMA.16816.F32 R4, R4, R8, R4", "@UP0 UIADD3 UR8, -UR8, 0x100000, URZ")
    found = check_kernels.opcodes(text)
    assert found == {WIDE: {"LDC", "HGMMA", "LDGSTS"}, NARROW: {"HMMA", "UIADD3"}}
    assert check_kernels.check_opcodes([WIDE, NARROW], found) == []
    bad = check_kernels.opcodes(sass(WIDE, "@P0 LDL.64 R2, [R1]") + sass(ROUTE, "STL [R1+0x8], R2"))
    assert check_kernels.check_opcodes([WIDE, ROUTE, NARROW], bad) == [
        f"{WIDE}: LDL in the machine code",
        f"{WIDE}: no HGMMA or QGMMA in the machine code",
        f"{ROUTE}: STL in the machine code",
        f"{NARROW}: no machine code in the object; build again",
    ]


def test_machine_code_of_a_source(tmp_path):
    """What cuobjdump prints of the object is checked for opcodes and for registers of a wgmma in flight."""
    (tmp_path / "tile.cu.o").touch()
    (tmp_path / "tile.cu.o.log").write_text(ptxas(WIDE))
    cuobjdump = tmp_path / "cuobjdump"
    cuobjdump.write_text('#!/bin/sh\n[ "$1" = -sass ] && cat "$2.sass"\n')
    cuobjdump.chmod(0o755)

    def check():
        return check_kernels.check_source(Path("tile.cu"), tmp_path, cuobjdump).problems

    wgmma, wait = "QGMMA.64x16x32.F32.E4M3.E4M3 R24, R32, gdesc[UR12], RZ, !UPT, gsb0", "WARPGROUP.DEPBAR.LE gsb0, 0x0"
    (tmp_path / "tile.cu.o.sass").write_text(sass(WIDE, wgmma, wait, "MOV R33, R7", "EXIT"))
    assert check() == []
    (tmp_path / "tile.cu.o.sass").write_text(sass(WIDE, "LDL R5, [R1]", wgmma, "MOV R33, R7", wait, "EXIT"))
    assert check() == [
        f"{WIDE}: LDL in the machine code",
        f"{WIDE}: R33 belongs to a wgmma in flight at 0x0020: MOV R33, R7",
    ]
    (tmp_path / "tile.cu.o.sass").unlink()
    assert check()[0].startswith(f"{cuobjdump} failed: ")


def test_only_widths_beyond_mma_sync_need_wgmma():
    assert [check_kernels.uses_wgmma(name) for name in (WIDE, NARROW, ROUTE)] == [True, False, False]
    with pytest.raises(ValueError, match=r"widths of its TileConfig"):
        check_kernels.uses_wgmma("_ZN4gemm6kernelINS_10TileConfigILi2EEEEvv")


def test_exit_status_and_lines(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kernels, "BUILD_DIR", tmp_path)
    monkeypatch.setattr(kernels, "sources", lambda: [Path("route.cu"), Path("ops.cpp")])
    monkeypatch.setattr(check_kernels, "find_cuobjdump", lambda: None)
    assert check_kernels.main() == 1
    assert "route.cu: no object or route.cu.o.log in" in capsys.readouterr().err
    for name in ("route.cu.o", "ops.cpp.o", "ops.cpp.o.log"):
        (tmp_path / name).touch()
    (tmp_path / "route.cu.o.log").write_text(ptxas(ROUTE, used="Used 40 registers, 4096 bytes smem"))
    assert check_kernels.main() == 0
    out = capsys.readouterr().out
    assert "route           40 registers   4096 B static shared" in out
    assert "kernels: 1, problems: 0; machine code not checked: no cuobjdump found" in out
    (tmp_path / "route.cu.o.log").write_text(
        ptxas(ROUTE, "8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads")
    )
    assert check_kernels.main() == 1
    assert f"route.cu: {ROUTE}: 8 bytes stack frame" in capsys.readouterr().err
    (tmp_path / "route.cu.o.log").write_text("")
    assert check_kernels.main() == 1
    assert "route.cu: no kernel in" in capsys.readouterr().err
