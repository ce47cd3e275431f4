"""Asking everybody who works on a run to stop, through the store: reaches every node, needs no signal, pid or clock.

A request is one random id, and whoever enters the run remembers the id that is there: another one later on is meant
for them, however far they have come, and the one that was there never is. So a request that nobody heard, or that a
crash left behind, stops nobody who comes later. Knows no processes.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from bulkrun.data.storage.durable import read_json, replace_json
from bulkrun.job.store.run_dir import RunDir

_LOOK_AGAIN_S = 1.0


def request_cancel(run: RunDir) -> None:
    """Ask all who entered the run before now to save and stop."""
    replace_json(run.cancelled, {"request": secrets.token_hex(8)})


class CancelWatch:
    """Whether a cancel was requested after this was made; cheap enough to ask between any two steps."""

    def __init__(self, run: RunDir, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._clock = run, clock
        self._known = self._request()
        self._next_look = clock()
        self._cancelled = False

    def __call__(self) -> bool:
        """Whether a cancel was requested, as of at most a second ago."""
        return self.now() if self._clock() >= self._next_look else self._cancelled

    def now(self) -> bool:
        """Whether a cancel was requested, as of now; once true, it stays true."""
        self._next_look = self._clock() + _LOOK_AGAIN_S
        self._cancelled = self._cancelled or self._request() not in (None, self._known)
        return self._cancelled

    def _request(self) -> str | None:
        return (read_json(self._run.cancelled) or {}).get("request")
