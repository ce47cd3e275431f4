"""Whether a worker process is there and silent: stopped, swapped out for good, or stuck inside the kernel.

Its heartbeat's counter does not change for so long that no load, no slow disk and no long step explains it. Time in
which this process did not look either (a suspended machine) does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.workers import TTL_S, read_worker

SILENT_S = 10 * TTL_S
_LOOK_EVERY_S = 5.0
_GAP_S = 60.0  # a longer gap between two looks means that this process slept


class _Look(NamedTuple):
    """The last look at a worker: its counter, since when it is that, and when that was."""

    counter: int
    since: float
    looked: float


class FrozenWatch:
    """Looks at the workers of one supervisor now and then, as often as it is asked or less."""

    def __init__(self, run: RunDir, *, silent_s: float = SILENT_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._silent_s, self._clock = run, silent_s, clock
        self._look_every_s = min(_LOOK_EVERY_S, silent_s / 10)
        self._seen: dict[str, _Look] = {}

    def is_frozen(self, worker: str) -> bool:
        """Whether its last heartbeat is too long ago. One that has none yet is starting."""
        now = self._clock()
        before = self._seen.get(worker)
        if before is not None and now - before.looked < self._look_every_s:
            return False
        state = read_worker(self._run, worker)
        if state is None:
            return False
        is_silent = before is not None and before.counter == state.counter and now - before.looked < _GAP_S
        since = before.since if before is not None and is_silent else now
        self._seen[worker] = _Look(state.counter, since, now)
        return now - since >= self._silent_s
