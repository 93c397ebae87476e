# SPDX-License-Identifier: Apache-2.0
"""The wrappers of wgmma are what their generator writes."""

import subprocess
import sys
from pathlib import Path

import pytest

MMA = Path(__file__).resolve().parent.parent / "csrc/mma"


@pytest.mark.parametrize(("arguments", "header"), [([], "wgmma.cuh"), (["shared"], "wgmma_shared.cuh")])
def test_header_is_what_the_generator_writes(arguments, header):
    command = [sys.executable, MMA / "generate_wgmma.py", *arguments]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == (MMA / header).read_text()
