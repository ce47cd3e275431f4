"""The process that looks after this one, seen from here."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


class Supervisor:
    """The process that started this one and looks after it. Without it nobody would hear how this one ends."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def is_gone(self) -> bool:
        """Whether it has ended: an orphan has another parent."""
        return os.getppid() != self._pid

    def tell_me_when_gone(self) -> None:
        """Ask the kernel for SIGTERM at that moment, where it can do that; elsewhere `is_gone` tells, when asked."""
        if sys.platform == "linux":
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
