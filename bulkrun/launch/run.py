"""`submit` and `worker`: enter the run, start the planner and the workers, look after them until the end.

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

from bulkrun.errors import EXIT_OK, BulkrunError, Interrupted
from bulkrun.executors.devices import worker_environments
from bulkrun.executors.local import LocalWorkers
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import RunRecord, open_run, read_record
from bulkrun.job.views.status import read_status
from bulkrun.job.work.finish import RunTotals, read_totals
from bulkrun.job.work.progress import ProgressSnapshot
from bulkrun.job.work.team import TeamProgress
from bulkrun.launch.planner import PlannerProcess
from bulkrun.launch.prepare import PreparedJob, prepare
from bulkrun.launch.signals import DrainOnSignal, drain_on_signal
from bulkrun.launch.worker import command

_TEND_EVERY_S = 0.1
_LOOK_EVERY_S = 1.0


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

    @property
    def exit_code(self) -> int:
        """A finished run that is left alone is a success, whatever its rows are."""
        return self.totals.exit_code if self.worked else EXIT_OK


def submit(
    spec: JobSpec, view: View, *, job_file: Path | None = None, fresh: bool = False, resume_anyway: bool = False
) -> Submitted:
    """Run the job in the foreground, or continue it.

    Raises Interrupted when a signal ended it (everything is saved), and every `BulkrunError` of its parts.
    """
    with drain_on_signal() as drain:
        view.phase("checking the job, the input and the model")
        prepared = prepare(spec)
        record = open_run(prepared.run, prepared.record(job_file), fresh=fresh, resume_anyway=resume_anyway)
        if (totals := read_totals(prepared.run)) is not None:
            return Submitted(prepared.run, totals, worked=False)
        return run_to_end(prepared, record, view, drain)


def join(root: Path, workers: int | None, view: View) -> Submitted:
    """Help with a run that exists, from any process on any node that sees its directory; `workers` None: as its job.

    Paths in the job are relative to where it was submitted, so this must be called there too (or they be absolute).
    Raises what `submit` raises.
    """
    with drain_on_signal() as drain:
        run = RunDir(root)
        record = read_record(run)
        if (totals := read_totals(run)) is not None:
            return Submitted(run, totals, worked=False)
        view.phase("checking the input and the model")
        spec = JobSpec.model_validate(record.job)
        changed = {"output": spec.output.model_copy(update={"path": str(root)})}
        if workers is not None:
            changed["run"] = spec.run.model_copy(update={"workers": workers})
        return run_to_end(prepare(spec.model_copy(update=changed)), record, view, drain)


def run_to_end(prepared: PreparedJob, record: RunRecord, view: View, drain: DrainOnSignal) -> Submitted:
    """Plan and run what is in the run's directory, with `run.workers` processes.

    Loads no model itself. Raises Interrupted when a signal ended it, with everything saved, and the error that ended a
    worker or the planner.
    """
    run, began = prepared.run, time.monotonic()
    environments = worker_environments(prepared.spec.run.workers, prepared.spec.engine.device)
    workers = LocalWorkers(run, partial(command, run, supervisor=os.getpid()), environments)
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
        raise Interrupted(
            f"stopped by {drain.received or 'the workers'}: {read_status(run).rows_done:,} rows are done and saved; "
            "run the same command again to continue"
        )
    return Submitted(run, totals, worked=True, elapsed_s=time.monotonic() - began)


def _supervise(
    workers: LocalWorkers, planner: PlannerProcess, team: TeamProgress, view: View, drain: DrainOnSignal
) -> None:
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
