"""`submit`: enter the run, start the planner, load the engine, run until finished or told to stop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bulkrun.errors import EXIT_OK, Interrupted
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import RunRecord, open_run
from bulkrun.job.work.finish import RunTotals, read_totals
from bulkrun.job.work.progress import ProgressSnapshot
from bulkrun.job.work.runner import JobRunner
from bulkrun.launch.engine import engine_factory
from bulkrun.launch.planner import PlannerProcess
from bulkrun.launch.prepare import PreparedJob, prepare
from bulkrun.launch.signals import DrainOnSignal, drain_on_signal


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
        return _work(prepared, record, view, drain)


def _work(prepared: PreparedJob, record: RunRecord, view: View, drain: DrainOnSignal) -> Submitted:
    planner = PlannerProcess(prepared.run)
    try:
        view.phase("loading the model")
        make_engine = engine_factory(prepared)
        engine = make_engine()
        drain.started()
        view.phase("running")
        outcome = JobRunner(
            prepared.run,
            record,
            JobSpec.model_validate(record.job),
            engine,
            prepared.tokenizer.decode_batch,
            rebuild_engine=make_engine,
            should_stop=drain.should_stop,
            check_planner=planner.check,
            on_progress=view.update,
        ).run()
    finally:
        planner.stop()
    if outcome.totals is None:
        raise Interrupted(
            f"stopped by {drain.received}: {outcome.progress.rows_done:,} rows are done and saved; "
            "run the same command again to continue"
        )
    return Submitted(prepared.run, outcome.totals, worked=True, elapsed_s=outcome.progress.elapsed_s)
