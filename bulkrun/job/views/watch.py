"""Following a run that another process started."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import read_record
from bulkrun.job.store.run_totals import read_totals
from bulkrun.job.views.team import TeamProgress
from bulkrun.job.work.delivery import lacks_results
from bulkrun.job.work.progress import ProgressSnapshot

_PATIENCE_S = 10.0  # between two workers (a restart, a requeue) nobody is there for a moment


def watch_run(run: RunDir, clock: Callable[[], float] = time.monotonic) -> Iterator[ProgressSnapshot]:
    """Snapshots, as often as the caller asks, until the run is finished (its bucket complete) or nobody works on it.

    While a retry or an incremental night is under way they are of that: its workers work in the staged run.
    Raises RunError when the directory is not a run.
    """
    record = read_record(run)
    teams = TeamProgress(run.staged, clock), TeamProgress(run, clock)
    seen_at, latest = clock(), ProgressSnapshot()
    while read_totals(run) is None or run.staged.state.is_dir() or lacks_results(run, record):
        snapshot = next(filter(None, (team.snapshot() for team in teams)), None)
        if snapshot is not None:
            seen_at, latest = clock(), snapshot
        elif any(team.is_there() for team in teams):
            seen_at = clock()
        elif clock() - seen_at > _PATIENCE_S:
            return
        yield latest
