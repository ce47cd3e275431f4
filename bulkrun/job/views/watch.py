"""A run as it goes on, for somebody who did not start it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import read_record
from bulkrun.job.work.finish import read_totals
from bulkrun.job.work.progress import ProgressSnapshot
from bulkrun.job.work.team import TeamProgress

_PATIENCE_S = 10.0  # between two workers (a restart, a requeue) nobody is there for a moment


def watch_run(run: RunDir, clock: Callable[[], float] = time.monotonic) -> Iterator[ProgressSnapshot]:
    """Snapshots, as often as the caller asks, until the run is finished or nobody works on it.

    Raises RunError when the directory is no run.
    """
    read_record(run)
    team, seen_at, latest = TeamProgress(run, clock), clock(), ProgressSnapshot()
    while read_totals(run) is None or run.staged.state.is_dir():
        snapshot = team.snapshot()
        if snapshot is not None:
            seen_at, latest = clock(), snapshot
        elif team.is_there():
            seen_at = clock()
        elif clock() - seen_at > _PATIENCE_S:
            return
        yield latest
