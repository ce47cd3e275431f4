"""Signals of a run: the first one drains, a second one stops at once.

SIGINT (Ctrl-C), SIGTERM (Slurm, kill, shutdown) and SIGUSR1 (Slurm's early warning) all mean: stop admitting,
save, exit 75. A second SIGINT or SIGTERM ends the process on the spot with 130 or 143: nothing that was
journaled is lost by that, exactly as with kill -9.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from bulkrun.errors import Interrupted

DRAIN_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class DrainOnSignal:
    """Remembers that a signal asked the run to stop; `received` is its name or None."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._starting = True

    def should_stop(self) -> bool:
        return self.received is not None

    def started(self) -> None:
        """From here on the run loop looks at `should_stop`; until here a signal raises `Interrupted`."""
        self._starting = False
        if self.received:
            raise Interrupted(f"stopped by {self.received} before the first row")

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.received and number != signal.SIGUSR1:
            os._exit(128 + number)
        self.received = signal.Signals(number).name
        if self._starting:
            raise Interrupted(f"stopped by {self.received} while starting; nothing was in flight")


@contextmanager
def drain_on_signal() -> Iterator[DrainOnSignal]:
    """Handle the drain signals inside the block; the handlers of before come back at its end."""
    drain = DrainOnSignal()
    before = {number: signal.signal(number, drain._handle) for number in DRAIN_SIGNALS}
    try:
        yield drain
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
