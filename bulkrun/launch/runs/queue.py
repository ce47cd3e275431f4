"""A run in Slurm's queue: its workers are an array there, this process loads nothing and computes nothing."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass, replace

from bulkrun.errors import BulkrunError, ExecutorError, Interrupted, ResumeError, rebuilt
from bulkrun.executors.slurm import QueuedJob, how_it_ended, queued_jobs, submit_array
from bulkrun.executors.slurm_program import SlurmRefused
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.store.cancel import CancelWatch
from bulkrun.job.store.places import run_dir_of
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import RunRecord, read_record
from bulkrun.job.store.run_totals import read_totals
from bulkrun.job.update.cause import submit_command
from bulkrun.job.update.late_delivery import deliver_late
from bulkrun.job.update.settle import must_settle
from bulkrun.job.views.finished import finished_totals
from bulkrun.job.views.status import read_status
from bulkrun.job.views.team import TeamProgress
from bulkrun.launch.preparation.prepare import prepare
from bulkrun.launch.processes.signals import drain_on_signal
from bulkrun.launch.runs.enter_run import enter_run
from bulkrun.launch.runs.preview import check_prepared
from bulkrun.launch.runs.queue_turn import turn_to_queue
from bulkrun.launch.runs.run import Submitted, View, leave_finished
from bulkrun.launch.runs.submission import Submission

_LOOK_EVERY_S = 1.0
_ASK_QUEUE_EVERY = 10  # in looks; Slurm's controller is shared
_TIMES_GONE = 2  # a requeued job is between two states for a moment
_GOES_ON = ("RUNNING", "CONFIGURING", "COMPLETING")
_PATIENCE_S = 3600.0  # with a queue that gives no answer: a controller that is restarted, moved, upgraded


@dataclass(frozen=True)
class Queued:
    """A run whose workers wait or work in the queue; `new` is False when they were there before, `standing` how."""

    run: RunDir
    job_id: str
    new: bool
    standing: str | None = None


def put_into_queue(asked: Submission, view: View) -> Queued | Submitted:
    """Check the job, enter the run, put its array into the queue unless it is there already.

    Raises ExecutorError where Slurm refuses, or the submit is a night, and what checking and entering a run raises.
    """
    spec = asked.spec
    cancelled = CancelWatch(run_dir_of(spec.output.path, spec.output.state))
    view.phase("checking the job, the input and the model")
    prepared = prepare(spec)
    wanted = prepared.record(asked.job_file, asked.overrides)
    if spec.run.incremental and not asked.fresh:
        _refuse_night(prepared.run, wanted, full_refresh=asked.full_refresh)
    if not (prepared.run.run_json.exists() or spec.input.sql):  # a query may take long: it runs in the array
        check_prepared(prepared)  # an array may wait for hours before it finds a misspelt column
    entered = enter_run(prepared, wanted, asked, view)
    if (totals := finished_totals(prepared.run)) is not None:
        return leave_finished(prepared.run, entered.record, totals, cancelled)
    with turn_to_queue(prepared.run, cancelled, view.phase):
        if queued := queued_jobs(prepared.run):
            return Queued(prepared.run, queued[0].job_id.split("_")[0], new=False, standing=queued[0].standing)
        if cancelled.now():
            raise Interrupted("stopped by bulkrun cancel before anything was put into the queue")
        try:
            job_id = submit_array(prepared.run, JobSpec.model_validate(entered.record.job))
        except SlurmRefused:
            entered.undo(view)
            raise
    return Queued(prepared.run, job_id, new=True)


def _refuse_night(run: RunDir, wanted: RunRecord, *, full_refresh: bool) -> None:
    """Raise ExecutorError where the submit is a night: it changes results, which array elements cannot."""
    if not run.run_json.exists() or not (run.success.exists() or must_settle(run, read_record(run), wanted)):
        return
    settings = [override for override in wanted.overrides if not override.startswith("run.executor=")]
    command = submit_command(run, replace(wanted, overrides=settings)) + (" --full-refresh" if full_refresh else "")
    raise ExecutorError(
        f"{run.root}: only the first run of an incremental job can be an array; a later one runs where it is "
        f"started, so submit that to the queue: sbatch --wrap {shlex.quote(f'{command} --executor local')}"
    )


def wait_for(queued: Queued, view: View) -> Submitted:
    """Stay until the run is finished and its results are where they belong.

    When its array left the queue before that: raises what its workers failed with, else ExecutorError. And what
    `deliver` raises. A signal ends the waiting, not the run: Interrupted, as for a cancelled run.
    """
    run, began, team, array = queued.run, time.monotonic(), TeamProgress(queued.run), _ArrayWatch(queued, view)
    view.phase(f"waiting for Slurm job {queued.job_id}")
    with drain_on_signal() as drain:
        drain.cancel = CancelWatch(run)
        drain.started()
        while (totals := read_totals(run)) is None:
            if drain.should_stop():
                raise _waited_enough(queued, drain.received)
            if (snapshot := team.snapshot()) is not None:
                view.update(snapshot)
            array.check()
            time.sleep(_LOOK_EVERY_S)
        deliver_late(run, read_record(run), drain.should_stop)  # the element that should may be slow, or have failed to
    return Submitted(run, totals, worked=True, elapsed_s=time.monotonic() - began)


def _waited_enough(queued: Queued, signal: str | None) -> Interrupted:
    """Why nobody waits any more, and what becomes of the run: by a signal, else by a cancel."""
    if signal is None:
        return Interrupted(
            f"stopped by bulkrun cancel: Slurm job {queued.job_id} is taken out of the queue, its workers save what "
            "they have; run the same command again to continue"
        )
    return Interrupted(f"stopped waiting by {signal}; Slurm job {queued.job_id} goes on, `bulkrun cancel` stops it")


def _left_the_queue(queued: Queued) -> BulkrunError:
    """What Slurm says of an array that ended too early, and what its workers said of their failure.

    Of the class of that, for who waits ends with the exit code that the run would have ended with here.
    """
    run, how, found = queued.run, how_it_ended(queued.run), read_status(queued.run)
    failure = (found.message if found.state == "failed" else None) or ""
    why, kind = f" ({how})" if how else "", failure.partition(":")[0]
    said = f": {failure}" if failure else ""
    again = "" if kind == ResumeError.__name__ else "; the same command continues"  # else it says itself what does
    words = (
        f"{run.root}: job {queued.job_id} left the queue before the run was finished{why}{said}; "
        f"`bulkrun logs {run.root}` shows more{again}"
    )
    return rebuilt(kind, words) if failure else ExecutorError(words)


class _ArrayWatch:
    """Whether a run's array is still in the queue, asked now and then. No answer is none: the array may well work."""

    def __init__(self, queued: Queued, view: View) -> None:
        self._queued, self._view = queued, view
        self._looks = self._gone = 0
        self._said = {"", "None", *_GOES_ON}
        self._unheard_since: float | None = None

    def check(self) -> None:
        """Raises what `_left_the_queue` makes of an array that did, ExecutorError when the queue is silent for long."""
        self._looks += 1
        if self._looks % _ASK_QUEUE_EVERY:
            return
        try:
            jobs = queued_jobs(self._queued.run)
        except ExecutorError as error:
            self._bear(error)
            return
        self._unheard_since = None
        self._say_why_they_wait(jobs)
        self._gone = 0 if jobs else self._gone + 1
        if self._gone >= _TIMES_GONE:
            raise _left_the_queue(self._queued)

    def _say_why_they_wait(self, jobs: list[QueuedJob]) -> None:
        """Each reason once: some come and go for hours."""
        for job in jobs:
            why = job.reason if job.state == "PENDING" else job.state
            if why not in self._said:
                self._said.add(why)
                self._view.note(job.standing)

    def _bear(self, error: ExecutorError) -> None:
        job = f"Slurm job {self._queued.job_id}"
        if self._unheard_since is None:
            self._unheard_since = time.monotonic()
            self._view.note(f"{error}; still waiting for {job}")
        if time.monotonic() - self._unheard_since > _PATIENCE_S:
            raise ExecutorError(f"{error}; {job} may still be there: the same command waits for it again") from error
