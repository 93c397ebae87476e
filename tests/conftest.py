# SPDX-License-Identifier: Apache-2.0
"""What holds for every test."""

import pytest
import torch


@pytest.fixture(autouse=True)
def default_dtype():
    """Each test starts with float32: vLLM's context manager leaves the model's dtype behind when loading raises."""
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)
