"""Whether a Ray cluster's head (its GCS) is still there, asked in a thread: a call that it does not answer never ends.

Ray itself ends the whole process, in the middle of whatever it does, when it has missed the head for a minute. Who
notices before that can still let the workers save, and say what happened.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

_ASK_EVERY_S = 5.0
_PATIENCE_S = 30.0  # of the minute; the rest is for the workers to save
_LOOK_MOST_S = 1.0  # a process that was stopped for a while, as by Ctrl-Z, heard nothing meanwhile, as a sleeper does


class HeadWatch:
    """`ask` is anything that only the head can answer; failing is no answer."""

    def __init__(self, ask: Callable[[], object]) -> None:
        self._ask = ask
        self._answered, self._ended = threading.Event(), threading.Event()
        self._silent_s, self._looked_at = 0.0, time.monotonic()
        threading.Thread(target=self._keep_asking, name="ray-head", daemon=True).start()

    def is_silent(self) -> bool:
        """Whether no answer came for long, over the looks that were taken meanwhile."""
        now = time.monotonic()
        self._silent_s += min(now - self._looked_at, _LOOK_MOST_S)
        self._looked_at = now
        if self._answered.is_set():
            self._answered.clear()
            self._silent_s = 0.0
        return self._silent_s > _PATIENCE_S

    def stop(self) -> None:
        """Ask no more."""
        self._ended.set()

    def _keep_asking(self) -> None:
        while not self._ended.wait(_ASK_EVERY_S):
            with suppress(Exception):  # whatever else Ray says, it is no answer
                self._ask()
                self._answered.set()
