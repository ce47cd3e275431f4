"""Fixtures and switches that every test may use."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

from tests.processor import has_avx512, has_gpu_driver

if not has_gpu_driver():  # as `interprets` of tests/processor.py has it
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported, which transformers does too
    if has_avx512():
        os.environ["OPENBLAS_CORETYPE"] = "SkylakeX"  # whatever it was: see tests/processor.py

if "PYTEST_XDIST_WORKER" in os.environ:
    # read when OpenMP is loaded, with torch: threads of several processes that spin for their next piece of work take
    # the cores from each other (two processes with two threads each on two cores: six times as slow)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["OMP_NUM_THREADS"] = "1"  # each of the processes has a core; tests of several threads say how many

# Many tests start bulkrun, whose processes would each compile all its modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# How long one example takes says nothing: the machine may be doing something else beside.
settings.register_profile("any_speed", deadline=None)
settings.load_profile("any_speed")

pytest_plugins = [
    "tests.s3_server",
    "tests.hub_server",
    *(["tests.lost_gpu"] if "PYTEST_XDIST_WORKER" in os.environ else []),
]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run tests that take minutes")


@pytest.fixture
def watched_kernels() -> Iterator[None]:
    """Each kernel of the test is checked for races and stray addresses, where Triton interprets it."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from tests.ops.triton.sanitizer import watched_kernels

    with watched_kernels():
        yield


@pytest.hookimpl(optionalhook=True)
@pytest.fixture
def two_threads() -> Iterator[None]:
    """Compiled ops with two, which in wide steps have rows of their own."""
    import torch  # takes seconds, and few tests ask for it

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    from tests.two_halves import TwoHalves

    return TwoHalves(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # a process of pytest-xdist
        from tests.two_halves import be_polite, shared_last

        shared_last(items)
        be_polite()
    _skip_without_gpu([item for item in items if item.get_closest_marker("gpu")])
    if config.getoption("--slow"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="minutes long: run with --slow"))


def _skip_without_gpu(items: list[pytest.Item]) -> None:
    if not items:
        return
    import torch  # slow, and most folders of the job column need none

    for item in [] if torch.cuda.is_available() else items:
        item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
