"""Fixtures and switches that every test may use."""

from __future__ import annotations

import os

import pytest

from tests.processor import has_avx512, has_gpu_driver

if not has_gpu_driver():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported, which transformers does too
    if has_avx512():
        os.environ["OPENBLAS_CORETYPE"] = "SkylakeX"  # whatever it was: see tests/processor.py

pytest_plugins = ["tests.s3_server"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run tests that take minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="minutes long: run with --slow"))
