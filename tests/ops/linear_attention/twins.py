"""What the tests of linear attention share: an op's twins, where each runs, and how exact each dtype is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bulkrun.ops.cpu.library import library
from tests.ops.linear_attention.steps import DECODE, MIXED

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
STEPS = {"mixed": MIXED, "decode": DECODE}
GPU = "cuda" if torch.cuda.is_available() else "cpu"
ERRORS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def twins(module: object, name: str) -> list[object]:
    """The C++ one, where there is a compiler, and the kernel."""
    skip = pytest.mark.skipif(library() is None, reason="no compiled ops")
    of_cpu, of_gpu = module  # type: ignore[misc]
    return [
        pytest.param(getattr(of_cpu, name), marks=skip, id="compiled"),
        pytest.param(getattr(of_gpu, name), id="triton"),
    ]


def device_of(op: Callable[..., object], dtype: torch.dtype) -> str:
    """Where an op runs; skips what the interpreter has wrong."""
    if not op.__module__.startswith("bulkrun.ops.triton"):
        return "cpu"
    if GPU == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter is wrong for bf16")
    return GPU
