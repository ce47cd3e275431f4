"""One run from its record to its end: start the planner and the workers, look after them until all is done.

This process loads no torch and no model; it holds what must outlive a worker that dies. Everything that is done is done
by its children, and shown from their heartbeats.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from bulkrun.errors import EXIT_OK, BulkrunError, Interrupted, RunError
from bulkrun.executors.allocation import current_allocation
from bulkrun.executors.devices import visible_gpus, worker_environments
from bulkrun.executors.local import DRAIN_S, LocalWorkers
from bulkrun.executors.ray_cluster import RayWorkers
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.plan.plan_view import is_outdated
from bulkrun.job.store.attempts import forget_failed_attempts
from bulkrun.job.store.heartbeat import present
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import RunRecord, read_record
from bulkrun.job.store.run_totals import RunTotals, read_totals
from bulkrun.job.store.workers import Worker
from bulkrun.job.update.late_delivery import deliver_late
from bulkrun.job.views.finished import finished_totals
from bulkrun.job.views.status import read_status
from bulkrun.job.views.team import TeamProgress
from bulkrun.job.work.delivery import ShouldStop
from bulkrun.job.work.finish import remove_old_temporaries
from bulkrun.job.work.progress import ProgressSnapshot
from bulkrun.launch.preparation.prepare import PreparedJob, prepare
from bulkrun.launch.processes.planner import PlannerProcess
from bulkrun.launch.processes.signals import DrainOnSignal
from bulkrun.launch.processes.stoppable import stoppable
from bulkrun.launch.processes.worker import command

_TEND_EVERY_S = 0.1
_LOOK_EVERY_S = 1.0
_END_GRACE_S = 5.0  # after the run's end: workers end by themselves, but for one that is frozen
_TIME_LIMIT = "its time limit"
_FRUITLESS_TURNS = 3  # under Slurm: one may have met a cold disk


class Workers(Protocol):
    """The workers that this process looks after, whoever starts them."""

    def tend(self) -> bool:
        """Start what is due, look after what ended; whether anybody works. Raises the error that ended one."""

    def stop(self, grace_s: float = DRAIN_S) -> list[BulkrunError]:
        """Let all save and end; the errors that kept some from saving."""

    def kill(self) -> None:
        """End all at once."""


class View(Protocol):
    """Where a run shows its progress."""

    def phase(self, text: str) -> None:
        """What happens now, in a few words."""

    def update(self, snapshot: ProgressSnapshot) -> None:
        """The numbers, about once a second."""

    def note(self, text: str) -> None:
        """What is to stay on the screen."""


@dataclass(frozen=True)
class Submitted:
    """A finished run; `worked` is False when it was finished before and no row was run.

    `uploaded`: how many parts its bucket still lacked then; None where it was complete.
    """

    run: RunDir
    totals: RunTotals
    worked: bool
    elapsed_s: float = 0.0
    uploaded: int | None = None
    changes: dict[str, int] | None = None  # of a retry or an incremental night: rows new, changed, failed, ...

    @property
    def exit_code(self) -> int:
        """A finished run that is left alone is a success, whatever its rows are."""
        return self.totals.exit_code if self.worked else EXIT_OK


def join(root: Path, workers: int | None, view: View) -> Submitted:
    """Help with a run that exists, from any process on any node that sees its directory; `workers` None: as its job.

    Paths in the job are relative to where it was submitted, so this must be called there too (or they be absolute).
    Raises what `run_to_end` raises, and what preparing the job does.
    """
    run = RunDir(root)
    with stoppable(run, view.phase) as drain:
        record = read_record(run)
        if (totals := finished_totals(run)) is not None:
            return leave_finished(run, record, totals, drain.should_stop, look=True)
        if is_outdated(run, record):
            raise RunError(
                f"{run.success}: missing, and the plan is older than the last night: submit its job again, which finds "
                "what is missing by comparing"
            )
        view.phase("checking the input and the model")
        spec = working_here(JobSpec.model_validate(record.job), workers)
        return run_to_end(prepare(spec.with_keys(output={"path": str(root)})), record, view, drain)


def working_here(spec: JobSpec, workers: int | None = None) -> JobSpec:
    """The job as this process runs it, with so many workers; None: as it says.

    With Slurm it says how many elements the array has. Here is one of them, or one more: it has its GPUs' workers.
    """
    if spec.run.executor != "slurm":
        return spec if workers is None else spec.with_keys(run={"workers": workers})
    gpus = visible_gpus() if workers is None and spec.engine.device != "cpu" else []
    return spec.with_keys(run={"executor": "local", "workers": workers or max(1, len(gpus))})


def leave_finished(
    run: RunDir, record: RunRecord, totals: RunTotals, should_stop: ShouldStop, *, look: bool = False
) -> Submitted:
    """A run that was found finished: its bucket gets what it lacks, old files of killed processes go, no row is run.

    `look`, and what is raised: as of `deliver_late`.
    """
    remove_old_temporaries(run)
    return Submitted(run, totals, worked=False, uploaded=deliver_late(run, record, should_stop, look=look))


def run_to_end(prepared: PreparedJob, record: RunRecord, view: View, drain: DrainOnSignal) -> Submitted:
    """Plan and run what is in the run's directory, with `run.workers` processes.

    Loads no model itself. Raises Interrupted when a signal ended it, with everything saved, and the error that ended a
    worker or the planner.
    """
    run, began = prepared.run, time.monotonic()
    forget_failed_attempts(run)
    # While a model loads, nothing else shows that this process is at work.
    with present(run, Worker.this_process(), "supervisor"):
        workers = _make_workers(prepared.spec, run, record.run_id, view)
        planner = PlannerProcess(run, record.run_id)
        drain.before_ending = workers.kill
        unsaved: list[BulkrunError] = []
        ended: float | None = None
        try:
            drain.started()
            ended = _supervise(run, workers, planner, view, drain)
        finally:
            unsaved = workers.stop(DRAIN_S if ended is None else _END_GRACE_S)
            planner.stop()
        for error in unsaved:
            raise error
        totals = read_totals(run)
        if totals is None:
            raise _interrupted(run, view, drain)
        deliver_late(run, record, drain.should_stop)  # a worker that had to be ended may not have done it
    return Submitted(run, totals, worked=True, elapsed_s=(ended or time.monotonic()) - began)


def _interrupted(run: RunDir, view: View, drain: DrainOnSignal) -> BulkrunError:
    """What stopped an unfinished run, and who continues it: inside a Slurm job whose time is up, Slurm.

    Not where turn after turn ended before a single row did: it would go on like that for ever.
    """
    cancelled, allocation = drain.cancelled(), current_allocation()
    limit = read_record(run).job["run"]["walltime"]
    has_end = limit is not None or (allocation is not None and allocation.ends_at is not None)
    by_itself = _TIME_LIMIT if has_end else "a signal to its workers"
    by = drain.received or ("bulkrun cancel" if cancelled else by_itself)
    time_ran_out = not cancelled and drain.received in (None, "SIGUSR1")
    too_short = _too_short(limit) if has_end and time_ran_out and not run.holds_results else ""
    if too_short and allocation is not None and allocation.restarts + 1 >= _FRUITLESS_TURNS:
        return RunError(f"stopped by {by} in turn {allocation.restarts + 1}, and no row is done yet: {too_short}")
    next_turn = "run the same command again to continue"
    if allocation is not None and time_ran_out:
        # Said first: the cluster ends at once what it takes back.
        view.phase(f"stopped by {by}, all is saved: asking Slurm to start job {allocation.job_id} again")
        next_turn = "Slurm starts it again" if allocation.requeue() else next_turn
    if too_short:
        next_turn = f"{too_short}, or every turn will end like this; then {next_turn}"
    return Interrupted(f"stopped by {by}: {read_status(run).rows_done:,} rows are done and saved; {next_turn}")


def _too_short(walltime_s: float | None) -> str:
    whose = f"run.walltime, {walltime_s:g} s," if walltime_s is not None else "the allocation's time"
    return f"{whose} leaves no time after start-up: allow more"


def _make_workers(spec: JobSpec, run: RunDir, run_id: str, view: View) -> Workers:
    """The workers of this process, by the job's executor. A Slurm job has its own place: it works where it is."""
    if spec.run.executor == "ray":
        view.phase("connecting to Ray")
        needs_no_gpu = spec.engine.device == "cpu" and spec.ray.gpus is None
        ray = spec.with_keys(ray={"gpus": 0}).ray if needs_no_gpu else spec.ray
        return RayWorkers(run, partial(command, run_id=run_id), spec.run.workers, ray, view.note)
    environments = worker_environments(spec.run.workers, spec.engine.device)
    return LocalWorkers(run, partial(command, run, supervisor=os.getpid(), run_id=run_id), environments)


def _supervise(
    run: RunDir, workers: Workers, planner: PlannerProcess, view: View, drain: DrainOnSignal
) -> float | None:
    """Until all workers have ended, the run is finished or a signal came: restart who died, show how it goes.

    Returns when the run was seen to be finished, None if that was not seen. Workers then have a little time to end; one
    that does not (frozen, on a node that hangs) has nothing left to do, and nobody needs to wait for it.
    """
    view.phase("loading the model")
    show, finished = _Shown(TeamProgress(run), view), None
    while workers.tend() and not drain.should_stop():
        planner.check()
        show.now_and_then()
        if finished is None and run.success.exists():
            finished = time.monotonic()
        if finished is not None and time.monotonic() - finished >= _END_GRACE_S:
            break
        time.sleep(_TEND_EVERY_S)
    return finished


class _Shown:
    """The workers' numbers, as last given to the view."""

    def __init__(self, team: TeamProgress, view: View) -> None:
        self._team, self._view = team, view
        self._running, self._next_look = False, 0.0

    def now_and_then(self) -> None:
        """The numbers, once anybody is at work."""
        if time.monotonic() < self._next_look or (snapshot := self._team.snapshot()) is None:
            return
        self._next_look = time.monotonic() + _LOOK_EVERY_S
        if not self._running:
            self._view.phase("running")
        self._running = True
        self._view.update(snapshot)
