"""`submit` of an incremental job that has results: find what the night brought, run only that, merge it.

A staged run that was begun for the same job and input is continued. One that was begun for something else is merged
as far as it came, and the comparison is made anew, so that nothing that finished is lost or run twice.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from typing import NamedTuple

from bulkrun.job.plan.plan_input import PlanInput
from bulkrun.job.plan.report import undeclared_lines
from bulkrun.job.store.run_gate import open_run
from bulkrun.job.store.run_record import RunRecord, read_record
from bulkrun.job.store.run_totals import RunTotals, read_totals
from bulkrun.job.update.cause import Night
from bulkrun.job.update.compatibility import check_rows_that_stay, check_settings, settings_changed
from bulkrun.job.update.diff import Changes, Reasons
from bulkrun.job.update.settle import must_settle, settle_run, settle_update
from bulkrun.job.update.staging import (
    close_staging,
    discard,
    open_staging,
    order_again,
    pending_update,
    read_update,
    removed_on_failure,
    staged_record,
)
from bulkrun.job.update.update_claim import hold
from bulkrun.job.views.finished import finished_totals
from bulkrun.job.work.error_rate import MIN_ROWS
from bulkrun.launch.preparation.prepare import PreparedJob, prepare_as_of
from bulkrun.launch.processes.signals import DrainOnSignal
from bulkrun.launch.runs.run import Submitted, View
from bulkrun.launch.runs.submission import Submission
from bulkrun.launch.runs.update import finish_update
from bulkrun.launch.runs.update_input import compare, new_update, night_input, write_input


class _Submit(NamedTuple):
    """Tonight's job on a run that is there, with the run's `record` and the one that tonight's job would have."""

    prepared: PreparedJob
    record: RunRecord
    wanted: RunRecord

    def staged(self, failed: int = 0) -> RunRecord:
        """The record of the staged run: of tonight's model and settings, and as old as the run (`staged_record`).

        Rows that failed before (`failed` of them) may all fail again, which says nothing of tonight's others: the limit
        is higher by their share of the fewest rows that it is held against.
        """
        limit = min(1.0, self.wanted.job["run"]["max_error_rate"] + failed / MIN_ROWS)
        record = self.wanted.as_old_as(self.record)
        return staged_record(self.prepared.run, record, self.wanted.job, max_error_rate=limit)


def submit_again(prepared: PreparedJob, asked: Submission, view: View, drain: DrainOnSignal) -> Submitted | None:
    """The night's work on a run that has results; None when there is no run yet, or its first one goes on as usual.

    Raises ResumeError (with the difference) when settings changed and `full_refresh` does not ask for all rows,
    RunError when results are lost: a night would write new totals over the loss.
    """
    run = prepared.run
    if not run.run_json.exists():
        return None
    record = read_record(run)
    prepared = prepare_as_of(record, prepared.spec)
    wanted = prepared.record(asked.job_file, asked.overrides).as_known_to(record)
    if read_totals(run) is None and not must_settle(run, record, wanted):
        return None
    with hold(run):
        record = read_record(run)  # another night may just have ended
        check_settings(run, record, wanted, full_refresh=asked.full_refresh)
        if read_totals(run) is None:
            view.phase(
                "the input changed before the first run was done, or _SUCCESS is lost: keeping the existing rows"
            )
            settle_run(run, record)
        return _night(_Submit(prepared, record, wanted), view, drain, full_refresh=asked.full_refresh)


def _night(submit: _Submit, view: View, drain: DrainOnSignal, *, full_refresh: bool) -> Submitted:
    run, wanted = submit.prepared.run, submit.wanted
    totals = finished_totals(run)
    assert totals is not None, "the first run is finished"
    night = Night(wanted.plan_hash, full_refresh, submit.prepared.spec.run.on_vanished)
    update = pending_update(run, totals.generation)
    if update is not None and update.cause != night:
        view.phase("merging what an earlier night or retry finished")
        totals, update = settle_update(run), None
        check_settings(run, read_record(run), wanted, full_refresh=full_refresh)  # of what was merged
    if update is None:
        view.phase("comparing the input with the results")
        with removed_on_failure(run):
            changes = _stage(submit, totals, night, view)
        if (update := read_update(run)) is None:
            return Submitted(run, totals, worked=False, changes=changes.counts)
    else:
        order_again(run, update, wanted)
    open_run(run.staged, submit.staged(update.counts["failed"]), resume_anyway=True)
    return finish_update(run, view, drain)


def _stage(submit: _Submit, totals: RunTotals, night: Night, view: View) -> Changes:
    """Compare, and stage what is to run; where nothing is, nothing is left behind.

    New settings are a change of their own, though no row has another key for them: the record takes them in a merge.
    """
    prepared, record, wanted = submit
    run, renewed = prepared.run, settings_changed(record, wanted)
    assert wanted.key_salt is not None, "the job is incremental"
    staged = open_staging(run, submit.staged())
    with prepared.open_dataset(staged.sql_snapshot) as dataset:
        source = night_input(prepared, dataset)
        changes = compare(source, run, totals, wanted.key_salt, _reasons(night, renewed=renewed), staged.tmp)
        check_rows_that_stay(run, record, wanted, changes)
        for line in undeclared_lines(source.dataset.undeclared_columns):
            view.phase(line)
        if changes.rows or changes.dropped or renewed:
            _close(submit, totals, night, source, changes)
        else:
            discard(run)
    return changes


def _reasons(night: Night, *, renewed: bool) -> Reasons:
    """After a change of settings keys tell which rows a refresh has run that did not fit into one night."""
    drop = night.on_vanished == "drop"
    return Reasons(everything=night.full_refresh and not renewed, renewed=renewed, drop_vanished=drop)


def _close(submit: _Submit, totals: RunTotals, night: Night, source: PlanInput, changes: Changes) -> None:
    """Stage what the comparison found."""
    prepared, wanted = submit.prepared, submit.wanted
    update = new_update(prepared.run, totals, night, changes.rows, changes.new, changes.counts)
    close_staging(
        prepared.run,
        replace(update, dropped=changes.dropped, record=asdict(wanted)),
        partial(write_input, source.dataset, changes, limit=prepared.spec.run.limit),
        partial(prepared.check_input, wanted),
    )
