"""Workers that somebody else started: what the queue says of them, and how all of them are told to stop."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from bulkrun.errors import ExecutorError
from bulkrun.executors.slurm import (
    QueuedJob,
    cancel_jobs,
    how_it_ended,
    jobs_of,
    may_be_queued,
    own_queue,
    queued_jobs,
)
from bulkrun.job.store.cancel import request_cancel
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import read_record
from bulkrun.job.store.run_totals import read_totals
from bulkrun.job.store.workers import HEARTBEAT_S, LifeWatch, WorkerState, beats, read_workers
from bulkrun.job.views.listing import DamagedRun, statuses
from bulkrun.job.views.status import RunStatus, next_command, read_status

_SILENT_S = 4 * HEARTBEAT_S
_NOBODY_WORKS = ("interrupted", "failed", "stalled")
_STOP = ("supervisor", "runner")  # the others are these ones' children, or end on their own


@dataclass(frozen=True)
class Cancelled:
    """Who was told, as far as they can be seen: processes by their ids, and Slurm jobs. `finished`: the run is done.

    The `silent` ones of the processes gave no sign of life for some seconds: whether they hear it is not known.
    """

    workers: list[str] = field(default_factory=list)
    slurm_jobs: list[str] = field(default_factory=list)
    finished: bool = False
    silent: list[str] = field(default_factory=list)


def cancel_run(run: RunDir) -> Cancelled:
    """Tell them all, those that are still starting too; returns at once.

    Raises RunError for a directory that is not a run, ExecutorError for Slurm's.
    """
    read_record(run)
    request_cancel(run)
    runs = [run, run.staged] if run.staged.state.is_dir() else [run]
    found = [(one, state) for one in runs for state in _living(one)]
    silent = [state.worker.id for one, state in found if not beats(one, state, _SILENT_S)]
    finished = read_totals(run) is not None and len(runs) == 1
    try:
        jobs = cancel_jobs(run)
    except ExecutorError as error:
        raise ExecutorError(
            f"{error}; who is at work was told to stop, jobs that wait in Slurm's queue were not: run the same "
            "command again"
        ) from error
    return Cancelled([state.worker.id for _, state in found], jobs, finished, silent)


def status_with_queue(run: RunDir) -> tuple[RunStatus, list[QueuedJob]]:
    """How a run stands, and its jobs in Slurm's queue: a run that nobody works on may wait there, or have left it."""
    found = read_status(run)
    try:
        queue = queued_jobs(run)
    except ExecutorError as error:  # another machine, say
        unheard = f"Slurm's queue, in which it may be, cannot be asked from here ({str(error).splitlines()[-1]})"
        return (_with_message(found, unheard) if found.state in _NOBODY_WORKS else found), []
    if not queue and found.state in _NOBODY_WORKS:
        return _as_left(found, run), []
    return _as_queued(found, run, queue), queue


def statuses_with_queue(below: Path) -> list[RunStatus | DamagedRun]:
    """`status_with_queue` for all runs at or below a directory; asks the queue once, and only if one may be in it."""
    found, queue = statuses(below), []
    if any(one.state in _NOBODY_WORKS and may_be_queued(RunDir(one.root)) for one in found):
        with suppress(ExecutorError):
            queue = own_queue()
    return [
        _as_queued(one, RunDir(one.root), jobs_of(RunDir(one.root), queue)) if isinstance(one, RunStatus) else one
        for one in found
    ]


def _as_queued(found: RunStatus, run: RunDir, queue: list[QueuedJob]) -> RunStatus:
    if not queue or found.state not in _NOBODY_WORKS:
        return found
    if found.state == "stalled":
        if any(job.state == "RUNNING" for job in queue):
            return _with_message(found, queue[0].standing)
        found = replace(found, message=None)  # it worked in an earlier turn of its job, or is suspended
    next_one = next_command(run, read_record(run), "queued")
    before = f"; before that it failed: {found.message}" if found.state == "failed" else ""
    return replace(found, state="queued", message=queue[0].standing + before, next_command=next_one)


def _as_left(found: RunStatus, run: RunDir) -> RunStatus:
    """A run whose array is no more in the queue, with what became of that: workers may have ended without a word."""
    if found.state == "failed" or (how := how_it_ended(run)) is None:
        return found
    return replace(_with_message(found, how), state="interrupted")


def _with_message(found: RunStatus, more: str) -> RunStatus:
    return replace(found, message=f"{found.message}; {more}" if found.message else more)


def _living(run: RunDir) -> list[WorkerState]:
    life = LifeWatch(run)
    return [state for state in read_workers(run) if state.role in _STOP and life.alive(state.worker)]
