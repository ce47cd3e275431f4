"""Ops on a CPU come in two forms, torch reference and compiled C++: what is promised of one is promised of both."""

from __future__ import annotations

import os

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

    Not those of random sizes, for each of which a kernel would be compiled. Where kernels are interpreted, of `pairs`
    those are slow that add no pair.
    """
    for item in items:
        is_kernel = "triton" in getattr(getattr(item, "callspec", None), "id", "")
        if torch.cuda.is_available() and is_kernel and not hasattr(getattr(item, "obj", None), "hypothesis"):
            item.add_marker(pytest.mark.gpu)
        is_interpreted = os.environ.get("TRITON_INTERPRET") == "1" and (is_kernel or "ops/triton/" in item.nodeid)
        if is_interpreted and not adds_a_pair(item):
            item.add_marker(pytest.mark.slow)


def adds_a_pair(item: pytest.Item) -> bool:
    """Whether it is one of those that the marker `pairs` leaves: a Latin square over its parameters.

    Any values of all parameters but one leave a value of that one whose number makes the sum a multiple of the fewest
    values that a parameter has. So each two values meet, whatever the third is then.
    """
    marker = item.get_closest_marker("pairs")
    if marker is None:
        return True
    assert isinstance(item, pytest.Function)
    values = {mark.args[0]: list(mark.args[1]) for mark in item.iter_markers("parametrize")}
    numbers = [values[name].index(item.callspec.params[name]) for name in marker.args]
    return sum(numbers) % min(len(values[name]) for name in marker.args) == 0
