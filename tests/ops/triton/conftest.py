"""Kernels run on the GPU where there is one, else through Triton's interpreter, which is wrong for bf16.

Whether Triton interprets is settled in tests/conftest.py, before anything imports it.
"""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
