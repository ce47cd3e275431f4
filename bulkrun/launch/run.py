"""`submit` and `worker`: enter the run, start the planner and the workers, look after them until the end.

This process loads no torch and no model; it holds what must outlive a worker that dies. Everything that is done is done
by its children, and shown from their heartbeats.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from bulkrun.errors import EXIT_OK, BulkrunError, InputError, Interrupted, RunError, UsageError
from bulkrun.executors.allocation import current_allocation
from bulkrun.executors.devices import worker_environments
from bulkrun.executors.local import LocalWorkers
from bulkrun.executors.ray_cluster import RayWorkers
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.store.cancel import CancelWatch
from bulkrun.job.store.places import run_dir_of
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import RunRecord, forget_start, open_run, read_record
from bulkrun.job.store.workers import Heartbeat, Worker
from bulkrun.job.views.status import read_status
from bulkrun.job.work.delivery import deliver
from bulkrun.job.work.finish import RunTotals, read_totals
from bulkrun.job.work.progress import ProgressSnapshot
from bulkrun.job.work.team import TeamProgress
from bulkrun.launch.planner import PlannerProcess
from bulkrun.launch.prepare import PreparedJob, prepare
from bulkrun.launch.signals import DrainOnSignal, drain_on_signal
from bulkrun.launch.worker import command

_TEND_EVERY_S = 0.1
_LOOK_EVERY_S = 1.0


class Workers(Protocol):
    """The workers that this process looks after, whoever starts them."""

    def tend(self) -> bool:
        """Start what is due, look after what ended; whether anybody works. Raises the error that ended one."""

    def stop(self) -> list[BulkrunError]:
        """Let all save and end; the errors that kept some from saving."""

    def kill(self) -> None:
        """End all at once."""


class View(Protocol):
    """Where a run says how it goes."""

    def phase(self, text: str) -> None:
        """What happens now, in a few words."""

    def update(self, snapshot: ProgressSnapshot) -> None:
        """The numbers, about once a second."""


@dataclass(frozen=True)
class Submitted:
    """A finished run; `worked` is False when it was finished before and nothing was done."""

    run: RunDir
    totals: RunTotals
    worked: bool
    elapsed_s: float = 0.0
    changes: dict[str, int] | None = None  # of a retry or an incremental night: rows new, changed, failed, ...

    @property
    def exit_code(self) -> int:
        """A finished run that is left alone is a success, whatever its rows are."""
        return self.totals.exit_code if self.worked else EXIT_OK


def submit(
    spec: JobSpec,
    view: View,
    *,
    job_file: Path | None = None,
    fresh: bool = False,
    resume_anyway: bool = False,
    full_refresh: bool = False,
) -> Submitted:
    """Run the job in the foreground, or continue it. With `run.incremental`, bring its results up to date.

    Raises Interrupted when a signal ended it (everything is saved), and every `BulkrunError` of its parts.
    """
    with drain_on_signal() as drain:
        drain.cancelled = CancelWatch(run_dir_of(spec.output.path, spec.output.state))
        view.phase("checking the job, the input and the model")
        prepared = prepare(spec)
        if spec.run.incremental and not fresh:
            from bulkrun.launch.nightly import submit_again  # which runs what it stages with this module

            again = submit_again(prepared, view, drain, job_file=job_file, full_refresh=full_refresh)
            if again is not None:
                deliver(again.run, read_record(again.run), drain.should_stop)
                return again
        was_there, wanted = prepared.run.root.exists() and not fresh, prepared.record(job_file)
        record = open_run(prepared.run, wanted, fresh=fresh, resume_anyway=resume_anyway)
        if (totals := read_totals(prepared.run)) is not None:
            deliver(prepared.run, record, drain.should_stop)
            return Submitted(prepared.run, totals, worked=False)
        try:
            return run_to_end(prepared, record, view, drain)
        except (InputError, UsageError):
            if record.run_id == wanted.run_id:  # it began here
                with suppress(RunError, OSError):
                    forget_start(prepared.run, record, with_root=not was_there)
            raise


def join(root: Path, workers: int | None, view: View) -> Submitted:
    """Help with a run that exists, from any process on any node that sees its directory; `workers` None: as its job.

    Paths in the job are relative to where it was submitted, so this must be called there too (or they be absolute).
    Raises what `submit` raises.
    """
    with drain_on_signal() as drain:
        run = RunDir(root)
        drain.cancelled = CancelWatch(run)
        record = read_record(run)
        if (totals := read_totals(run)) is not None:
            return Submitted(run, totals, worked=False)
        view.phase("checking the input and the model")
        spec = JobSpec.model_validate(record.job)
        changed: dict[str, Any] = {"output": spec.output.model_copy(update={"path": str(root)})}
        if workers is not None:
            changed["run"] = spec.run.model_copy(update={"workers": workers})
        return run_to_end(prepare(spec.model_copy(update=changed)), record, view, drain)


def run_to_end(prepared: PreparedJob, record: RunRecord, view: View, drain: DrainOnSignal) -> Submitted:
    """Plan and run what is in the run's directory, with `run.workers` processes.

    Loads no model itself. Raises Interrupted when a signal ended it, with everything saved, and the error that ended a
    worker or the planner.
    """
    run, began = prepared.run, time.monotonic()
    with _heard_of(run):
        workers = _make_workers(prepared.spec, run)
        planner = PlannerProcess(run)
        drain.before_ending = workers.kill
        unsaved: list[BulkrunError] = []
        try:
            drain.started()
            _supervise(workers, planner, TeamProgress(run), view, drain)
        finally:
            unsaved = workers.stop()
            planner.stop()
        for error in unsaved:
            raise error
        totals = read_totals(run)
        if totals is None:
            raise _interrupted(run, view, drain)
    return Submitted(run, totals, worked=True, elapsed_s=time.monotonic() - began)


@contextmanager
def _heard_of(run: RunDir) -> Iterator[None]:
    """Show this process among those of the run: while a model loads, nobody else tells that somebody is there."""
    heartbeat = Heartbeat(run, Worker.this_process(), dict, role="supervisor")
    heartbeat.start()
    ended, message = "interrupted", None
    try:
        yield
        ended = "completed"
    except Interrupted:
        raise
    except BulkrunError as error:
        ended, message = "failed", str(error)
        raise
    finally:
        with suppress(RunError):  # a full disk: what happened before it is what is to be told
            heartbeat.stop(ended, message)


def _interrupted(run: RunDir, view: View, drain: DrainOnSignal) -> Interrupted:
    """What stopped an unfinished run, and who continues it: inside a Slurm job whose time is up, Slurm."""
    cancelled = drain.cancelled()
    by = drain.received or ("bulkrun cancel" if cancelled else "its time limit")
    next_turn = "run the same command again to continue"
    allocation = current_allocation()
    if allocation is not None and not cancelled and drain.received in (None, "SIGUSR1"):
        # Said first: the cluster ends at once what it takes back.
        view.phase(f"stopped by {by}, all is saved: asking Slurm to start job {allocation.job_id} again")
        next_turn = "Slurm starts it again" if allocation.requeue() else next_turn
    return Interrupted(f"stopped by {by}: {read_status(run).rows_done:,} rows are done and saved; {next_turn}")


def _make_workers(spec: JobSpec, run: RunDir) -> Workers:
    """The workers of this process, by the job's executor. A Slurm job has its own place: it works where it is."""
    if spec.run.executor == "ray":
        return RayWorkers(run, command, spec.run.workers, spec.ray)
    environments = worker_environments(spec.run.workers, spec.engine.device)
    return LocalWorkers(run, partial(command, run, supervisor=os.getpid()), environments)


def _supervise(workers: Workers, planner: PlannerProcess, team: TeamProgress, view: View, drain: DrainOnSignal) -> None:
    """Until all workers have ended or a signal came: restart who died, show how it goes."""
    view.phase("loading the model")
    running, next_look = False, 0.0
    while workers.tend() and not drain.should_stop():
        planner.check()
        if time.monotonic() >= next_look and (snapshot := team.snapshot()) is not None:
            next_look = time.monotonic() + _LOOK_EVERY_S
            if not running:
                view.phase("running")
            running = True
            view.update(snapshot)
        time.sleep(_TEND_EVERY_S)
