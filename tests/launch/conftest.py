"""What the tests of signals need."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def hangups_and_ctrl_c_count() -> Iterator[None]:
    """Processes started here hear SIGHUP and SIGINT, even where the tests run under `nohup` or behind a shell's `&`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL), signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGHUP, before[0])
    signal.signal(signal.SIGINT, before[1])
