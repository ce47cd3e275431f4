"""Ops on a CPU come in two forms, torch reference and compiled C++: what is promised of one is promised of both."""

from __future__ import annotations

import pytest

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
