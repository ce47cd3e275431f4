"""What a submit is: a night, a first run, or one that goes on; right here, or from a login node in Slurm's queue."""

from __future__ import annotations

from dataclasses import replace

from bulkrun.errors import InputError, UsageError
from bulkrun.executors.allocation import current_allocation
from bulkrun.job.store.places import run_dir_of
from bulkrun.job.store.run_record import read_record
from bulkrun.job.update.late_delivery import deliver_late
from bulkrun.job.views.finished import finished_totals
from bulkrun.launch.preparation.prepare import prepare
from bulkrun.launch.processes.stoppable import stoppable
from bulkrun.launch.runs.enter_run import enter_run
from bulkrun.launch.runs.nightly import submit_again
from bulkrun.launch.runs.queue import Queued, put_into_queue, wait_for
from bulkrun.launch.runs.run import Submitted, View, leave_finished, run_to_end, working_here
from bulkrun.launch.runs.submission import Submission


def submit_job(asked: Submission, view: View, *, wait: bool = False) -> Queued | Submitted:
    """Run the job, or continue it, where its executor says. With Slurm `wait` stays until the run is finished.

    Raises what `submit` and Slurm raise.
    """
    if asked.spec.run.executor == "slurm" and (here := current_allocation()) is not None:
        asked = replace(asked, spec=working_here(asked.spec))
        workers = "1 worker" if asked.spec.run.workers == 1 else f"{asked.spec.run.workers} workers"
        view.note(f"this is Slurm job {here.job_id} already: {workers} right here, nothing is put into the queue")
    if asked.spec.run.executor != "slurm":
        return submit(asked, view)
    done = put_into_queue(asked, view)
    return wait_for(done, view) if wait and isinstance(done, Queued) else done


def submit(asked: Submission, view: View) -> Submitted:
    """Run the job in the foreground, or continue it. With `run.incremental`, bring its results up to date.

    Raises Interrupted when a signal ended it (everything is saved), and every `BulkrunError` of its parts.
    """
    spec = asked.spec
    with stoppable(run_dir_of(spec.output.path, spec.output.state), view.phase) as drain:
        view.phase("checking the job, the input and the model")
        prepared = prepare(spec)
        if spec.run.incremental and not asked.fresh:
            again = submit_again(prepared, asked, view, drain)
            if again is not None:
                uploaded = deliver_late(again.run, read_record(again.run), drain.should_stop)
                return replace(again, uploaded=uploaded)
        entered = enter_run(prepared, prepared.record(asked.job_file, asked.overrides), asked, view)
        if (totals := finished_totals(prepared.run)) is not None:
            return leave_finished(prepared.run, entered.record, totals, drain.should_stop)
        try:
            return run_to_end(prepared, entered.record, view, drain)
        except (InputError, UsageError):
            entered.undo(view)
            raise
