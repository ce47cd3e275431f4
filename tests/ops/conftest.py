"""Ops on a CPU come in two forms, torch reference and compiled C++: what is promised of one is promised of both."""

from __future__ import annotations

import pytest
import torch

from bulkrun.ops import dispatch
from bulkrun.ops.cpu.library import compiled_ops


@pytest.fixture(params=["reference", "compiled"])
def cpu_ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs the test with both."""
    if request.param == "reference":
        monkeypatch.setattr(dispatch, "uses_compiled", lambda tensor: False)
    elif compiled_ops().library is None:
        pytest.skip(f"no compiled ops: {compiled_ops().reason}")
    return str(request.param)


@pytest.fixture(autouse=True)
def _watched(watched_kernels: None) -> None:
    """Every op that has a kernel."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where there is a GPU, kernels that are tested beside the other forms run there: `-m gpu` must find them.

    Not those of random sizes, for each of which a kernel would be compiled.
    """
    if not torch.cuda.is_available():
        return
    for item in items:
        is_kernel = "triton" in getattr(getattr(item, "callspec", None), "id", "")
        if is_kernel and not hasattr(getattr(item, "obj", None), "hypothesis"):
            item.add_marker(pytest.mark.gpu)
