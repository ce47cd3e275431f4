"""What a change to a finished run reads, and how that differs from the results: for a night, a retry and a preview.

Stages nothing and runs nothing.
"""

from __future__ import annotations

from pathlib import Path

from bulkrun.data.inputs.reader import Dataset
from bulkrun.data.inputs.subset import write_subset
from bulkrun.data.results.parts import read_part_info, read_part_schema
from bulkrun.data.results.schema import output_schema
from bulkrun.data.storage.durable import disk_errors
from bulkrun.errors import InputError, RunError
from bulkrun.job.plan.plan_input import PlanInput
from bulkrun.job.plan.result_columns import result_fields
from bulkrun.job.store.fingerprint import KeySalt
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_totals import RunTotals
from bulkrun.job.update.cause import Cause
from bulkrun.job.update.compatibility import check_columns_fit
from bulkrun.job.update.diff import Changes, Reasons, find_changes
from bulkrun.job.update.fitting import fit_dataset
from bulkrun.job.update.staging import Update
from bulkrun.launch.preparation.prepare import PreparedJob


def night_input(prepared: PreparedJob, dataset: Dataset) -> PlanInput:
    """The input of a night as it is compared and run, its values such that the columns of the results hold them.

    Raises ResumeError when the columns of today's results would not be those of the results there.
    """
    parts = prepared.run.parts()
    dataset = fit_results(prepared, dataset)
    source = PlanInput(prepared.spec, dataset, prepared.tokenizer, prepared.max_model_len, whole=True)
    declared = output_schema(source.passthrough, result_fields(prepared.spec))
    check_columns_fit(parts, declared, source.passthrough.names)
    return source


def fit_results(prepared: PreparedJob, dataset: Dataset) -> Dataset:
    """The rows with an error where a value does not fit into the results that are there."""
    parts, columns = prepared.run.parts(), prepared.spec.input.columns
    if not parts:
        return dataset
    carried = {*(columns or ()), prepared.spec.input.id}
    named = [name for name in dataset.schema.names if columns is None or name in carried]
    return fit_dataset(dataset, named, read_part_schema(parts[min(parts)]))


def compare(
    source: PlanInput, run: RunDir, totals: RunTotals, salt: KeySalt, reasons: Reasons, folder: Path
) -> Changes:
    """How the input differs from the results of the run; `folder` is for temporary files.

    Raises InputError where an input of no rows would drop all results: that is what a failed export looks like.
    """
    with disk_errors("comparing the input with the results", folder):
        changes = find_changes(source, list(run.parts().values()), salt, first_row(totals), reasons, folder)
    if reasons.drop_vanished and changes.vanished and not changes.rows_today:
        where = "input.path: holds" if source.spec.input.sql is None else "input.sql: gives"
        raise InputError(
            f"{where} no rows at all, and run.on_vanished: drop would drop every result; fix the input, or keep them "
            "with --set run.on_vanished=keep"
        )
    return changes


def first_row(totals: RunTotals) -> int:
    """The first row number that no result ever had."""
    return totals.rows if totals.next_row is None else totals.next_row


def new_update(run: RunDir, totals: RunTotals, cause: Cause, rows: int, new: int, counts: dict[str, int]) -> Update:
    """The next generation of a run: `rows` to run, `new` of which are new.

    Raises RunError before any work where the totals are not those of the parts, as of a `_SUCCESS` from a backup.
    """
    for path in run.parts().values():
        if (found := read_part_info(path).generation) > totals.generation:
            raise RunError(
                f"{path}: is of generation {found}, {run.success} of an earlier one ({totals.generation}): bring back "
                "the one that belongs to the parts, or delete it and submit the job again"
            )
    begin = first_row(totals)
    first_part = max(run.committed_shards(), default=-1) + 1
    return Update(cause, totals.generation + 1, rows, begin, begin + new, first_part, counts)


def write_input(dataset: Dataset, changes: Changes, path: Path, *, limit: int | None = None) -> None:
    """The rows that are to run, as an input of their own."""
    write_subset(path, dataset.schema, dataset.batches(limit=limit), changes.read_picks(), changes.rows)
