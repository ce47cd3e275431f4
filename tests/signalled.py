"""A signal whose handler raises, in the middle of whatever this process is doing then."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

LONG_SELECT = "SELECT sum(hash(a.range, b.range)) AS h FROM range(200000) a, range(200000) b"  # minutes


class Signalled(BaseException):
    """No `except Exception` takes it."""


@contextmanager
def signalled_after(seconds: float) -> Iterator[None]:
    """The body is to end with what the handler raises, and with nothing else."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        raise Signalled

    def again(unraisable: sys.UnraisableHookArgs) -> None:
        if unraisable.exc_type is Signalled:  # it met a finalizer, where Python drops it
            signal.setitimer(signal.ITIMER_REAL, 0.05)
        else:
            said(unraisable)

    said, sys.unraisablehook = sys.unraisablehook, again
    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with pytest.raises(Signalled):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = said
        signal.signal(signal.SIGALRM, before)
