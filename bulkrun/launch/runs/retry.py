"""`retry`: run the failed rows of a finished run again, with other settings if asked, and put them in their places."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from bulkrun.data.inputs.reader import Dataset
from bulkrun.data.inputs.subset import write_subset
from bulkrun.errors import ResumeError, UsageError, did_you_mean
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.plan.plan_input import PlanInput
from bulkrun.job.prompts.detect import detected_job, has_mapping
from bulkrun.job.store.difference_lines import difference_lines
from bulkrun.job.store.fingerprint import CHAT_TEMPLATE, HARMLESS, differences
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import RunRecord, read_record
from bulkrun.job.store.run_totals import RunTotals, read_totals
from bulkrun.job.update.cause import Retry
from bulkrun.job.update.diff import Reasons
from bulkrun.job.update.failed import failed_rows, picks_of
from bulkrun.job.update.merge import merge
from bulkrun.job.update.retry_job import refuse_other_columns, retry_job, sets_error_rate
from bulkrun.job.update.staging import (
    Update,
    close_staging,
    discard,
    is_merging,
    open_staging,
    pending_update,
    removed_on_failure,
    staged_record,
)
from bulkrun.job.update.update_claim import hold
from bulkrun.job.views.finished import finished_totals
from bulkrun.job.work.delivery import deliver
from bulkrun.launch.preparation.prepare import PreparedJob, prepare_as_of
from bulkrun.launch.processes.stoppable import stoppable
from bulkrun.launch.runs.run import Submitted, View
from bulkrun.launch.runs.update import finish_update
from bulkrun.launch.runs.update_input import compare, fit_results, new_update, night_input
from bulkrun.request import ERROR_CODES


def retry(
    root: Path,
    view: View,
    *,
    overrides: Sequence[str] = (),
    codes: Sequence[str] = (),
    begin_anew: bool = False,
    workers: int | None = None,
) -> Submitted:
    """Run the rows of a finished run that hold an error (one of `codes`, if given) again, or continue doing so.

    A row that fails again gets the newer error; a success is never replaced by an error. `begin_anew` throws away
    another change that is under way. `workers` None: as many as the job says. Raises UsageError where the run is not
    finished, an override cannot be, or another change is under way; ResumeError when the input or the model changed;
    Interrupted when a signal ended it.
    """
    run = RunDir(root)
    with stoppable(run, view.phase) as drain:
        asked = Retry(tuple(overrides), tuple(sorted(codes)))
        _finished(run, codes)  # fail early: hold() may wait half a minute
        with hold(run):
            totals = _finished(run, codes)
            if not _stage_or_resume(run, totals, asked, view, begin_anew):
                uploaded = deliver(run, read_record(run), drain.should_stop)  # a kill may have prevented the delivery
                merged = read_totals(run) or totals  # of another change, which may just have ended
                return Submitted(run, merged, worked=False, uploaded=uploaded, changes={"failed": 0})
            return finish_update(run, view, drain, workers=workers)


def _finished(run: RunDir, codes: Sequence[str]) -> RunTotals:
    """The totals of a run whose rows can be retried. Raises RunError and UsageError where there are none."""
    read_record(run)  # raises if the directory is not a run
    totals = finished_totals(run)
    if totals is None:
        raise UsageError(f"{run.root}: the run is not finished; `bulkrun submit` continues it, then retry what failed")
    _refuse_unknown(codes, totals)
    return totals


def _refuse_unknown(codes: Sequence[str], totals: RunTotals) -> None:
    """A code that no row can have is misspelled; one that none happens to have is nothing to do."""
    for code in codes:
        if code not in ERROR_CODES and code not in totals.errors:
            near = did_you_mean(code, ERROR_CODES, str)
            here = ", ".join(f"{name} ({rows:,})" for name, rows in totals.errors.items()) or "none"
            hint = f"; {near}" if near else ""
            raise UsageError(f"--code {code}: no such error code{hint} (in this run: {here})")


def _stage_or_resume(run: RunDir, totals: RunTotals, asked: Retry, view: View, begin_anew: bool) -> bool:
    """Stage the failed rows unless that was done before; another change under way is ended. Whether there are rows."""
    update = pending_update(run, totals.generation)
    if update is not None and update.cause != asked:
        totals, update = _end_other(run, totals, update, begin_anew), None
    if update is not None:
        return True
    view.phase("finding the rows that failed")
    with removed_on_failure(run):
        return _stage(run, read_record(run), totals, asked)


def _end_other(run: RunDir, totals: RunTotals, update: Update, begin_anew: bool) -> RunTotals:
    """What is being merged is merged; what is only computed goes if asked. Raises UsageError with the choice."""
    if is_merging(run):
        return merge(run)
    if begin_anew:
        discard(run)
        return totals
    raise UsageError(
        f"{run.root}: another update is under way: `{update.command(run)}` finishes it, "
        "--discard throws its rows away and begins this retry"
    )


def _stage(run: RunDir, record: RunRecord, totals: RunTotals, asked: Retry) -> bool:
    """Stage the failed rows; whether there are any."""
    as_it_was = prepare_as_of(record, JobSpec.model_validate(record.job), run.root)
    _refuse_other_facts(run, record, as_it_was)
    again = _prepared_again(record, as_it_was, asked)
    wanted = again.record(None)
    staged = open_staging(run, _staged(run, record, wanted, asked))
    incremental = as_it_was.spec.run.incremental
    with as_it_was.open_dataset(staged.sql_snapshot if incremental else run.sql_snapshot) as dataset:
        if incremental:
            picks = _by_id(as_it_was, record, dataset, totals, asked.codes)
        else:
            picks = _by_position(run, asked.codes)
        if not picks.rows:
            discard(run)
            return False
        update = new_update(run, totals, asked, picks.rows, 0, {"failed": picks.rows})
        close_staging(run, update, partial(_write_input, again, dataset, picks), partial(again.check_input, wanted))
    return True


def _prepared_again(record: RunRecord, as_it_was: PreparedJob, asked: Retry) -> PreparedJob:
    """The job with the settings that the retry asks for, and the rows' ids of before."""
    job = {**record.job, "input": {**record.job["input"], "id": _id_column(as_it_was)}}
    again = prepare_as_of(record, retry_job(job, asked.overrides), as_it_was.run.root)
    refuse_other_columns(record.job, again.spec, asked.overrides)
    return again


def _staged(run: RunDir, record: RunRecord, wanted: RunRecord, asked: Retry) -> RunRecord:
    """The record of the staged run: its rows have failed before, so all may fail again unless the retry says less."""
    own_rate = sets_error_rate(record.job, asked.overrides)
    record = replace(record, identity=wanted.identity)
    return staged_record(run, record, wanted.job, max_error_rate=None if own_rate else 1.0)


def _id_column(prepared: PreparedJob) -> str | None:
    """The column that names rows, which an OpenAI batch's columns tell where the job does not: with a prompt of its own
    a retry would not find it, and its rows would have other names."""
    spec = prepared.spec
    if spec.input.id is not None or has_mapping(spec.prompt):
        return spec.input.id
    with prepared.open_dataset(prepared.run.sql_snapshot) as dataset:
        return detected_job(spec, dataset.schema.names).input.id


class _Picks(NamedTuple):
    """How many rows are to run, and which."""

    rows: int
    read: Callable[[], Iterable[pa.RecordBatch]]


def _write_input(prepared: PreparedJob, dataset: Dataset, picks: _Picks, path: Path) -> None:
    """The rows that are to run with the columns that this retry reads: its prompt may be another."""
    dataset = fit_results(prepared, dataset)
    rows = PlanInput(prepared.spec, dataset, prepared.tokenizer, prepared.max_model_len).dataset
    write_subset(path, rows.schema, rows.batches(), picks.read(), picks.rows)


def _by_position(run: RunDir, codes: tuple[str, ...]) -> _Picks:
    rows = failed_rows(run, codes)
    return _Picks(len(rows), partial(picks_of, rows))


def _by_id(
    prepared: PreparedJob, record: RunRecord, dataset: Dataset, totals: RunTotals, codes: tuple[str, ...]
) -> _Picks:
    """In an incremental run a row's number is not its place in today's input: its id finds it there.

    All of the input is looked at: `run.limit` is how much the last night read, not how many rows have failed.
    """
    assert record.key_salt is not None, "the run is incremental"
    reasons = Reasons(failed_only=True, codes=codes)
    whole = prepared.spec.model_copy(update={"run": prepared.spec.run.model_copy(update={"limit": None})})
    source = night_input(replace(prepared, spec=whole), dataset)
    changes = compare(source, prepared.run, totals, record.key_salt, reasons, prepared.run.staged.tmp)
    return _Picks(changes.rows, changes.read_picks)


def _refuse_other_facts(run: RunDir, record: RunRecord, prepared: PreparedJob) -> None:
    """Raise ResumeError when the failed rows would not be run on what the others were run on."""
    found = differences(record.identity, prepared.record(None).identity)
    # With input.sql the rows are those of the snapshot; an incremental run compares keys.
    free = ("input.files",) if run.sql_snapshot.exists() or prepared.spec.run.incremental else ()
    free = (*free, f"prompt.{CHAT_TEMPLATE}")  # a retry may have another prompt
    changed = {key: values for key, values in found.items() if key not in (*free, *HARMLESS)}
    if changed:
        lines = [f"{run.root}: the run was made of something else, so a retry would not answer the same rows:"]
        raise ResumeError(
            "\n".join(
                [*lines, *difference_lines(changed), "Bring it back, or run the job from the beginning (--fresh)."]
            )
        )
