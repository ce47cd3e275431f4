"""Waiting in tests for what another process or thread does."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(true: Callable[[], object], what: str, seconds: float = 90.0) -> None:
    """Fails when it does not become true within so many seconds."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.02)
