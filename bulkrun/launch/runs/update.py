"""The end of every change to a finished run: its staged rows are run, then merged into the results."""

from __future__ import annotations

import time

from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import read_record
from bulkrun.job.store.run_totals import read_totals
from bulkrun.job.update.merge import merge
from bulkrun.job.update.staging import is_merging, read_update
from bulkrun.job.work.delivery import deliver
from bulkrun.launch.preparation.prepare import prepare_as_of
from bulkrun.launch.processes.signals import DrainOnSignal
from bulkrun.launch.runs.run import Submitted, View, run_to_end, working_here


def finish_update(run: RunDir, view: View, drain: DrainOnSignal, *, workers: int | None = None) -> Submitted:
    """Run what is staged, unless that is done, and merge it. Raises what `run_to_end` raises."""
    began, update = time.monotonic(), read_update(run)
    assert update is not None, "something is staged"
    if update.rows and not is_merging(run) and read_totals(run.staged) is None:
        record = read_record(run.staged)
        spec = working_here(JobSpec.model_validate(record.job), workers)
        run_to_end(prepare_as_of(record, spec, run.staged.root), record, view, drain)
    view.phase("putting the rows into the results")
    totals = merge(run)
    deliver(run, read_record(run), drain.should_stop)
    return Submitted(run, totals, worked=True, elapsed_s=time.monotonic() - began, changes=update.counts)
