"""What a night would do, without doing it: how the input differs from the results, and the plan of the rows to run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from bulkrun.data.inputs.subset import open_subset
from bulkrun.data.storage.durable import disk_errors
from bulkrun.job.plan.planner import dry_plan
from bulkrun.job.plan.report import PlanReport
from bulkrun.job.store.run_record import read_record
from bulkrun.job.store.run_totals import read_totals
from bulkrun.job.update.compatibility import check_settings
from bulkrun.job.update.diff import Reasons
from bulkrun.launch.preparation.prepare import PreparedJob, prepare_as_of
from bulkrun.launch.runs.update_input import compare, night_input, write_input
from bulkrun.scratch import Scratch


def plan_night(
    prepared: PreparedJob, keep: Callable[[pa.RecordBatch], None]
) -> tuple[dict[str, int], PlanReport] | None:
    """The counts of changes and the plan of what is to run; None where the job has no finished run. `keep` is shown the
    rows to run.

    Raises what `submit` would: ResumeError for other settings, InputError for ids that are not unique.
    """
    run = prepared.run
    if not run.run_json.exists() or (totals := read_totals(run)) is None:
        return None
    record = read_record(run)
    prepared = prepare_as_of(record, prepared.spec)
    wanted = prepared.record(None).as_known_to(record)
    check_settings(run, record, wanted, full_refresh=False)
    assert wanted.key_salt is not None, "the job is incremental"
    drop = prepared.spec.run.on_vanished == "drop"
    with Scratch() as folder, prepared.open_dataset() as dataset:
        source = night_input(prepared, dataset)
        changes = compare(source, run, totals, wanted.key_salt, Reasons(drop_vanished=drop), folder)
        subset = folder / "input.subset"
        with disk_errors("writing the rows to plan", subset):
            write_input(source.dataset, changes, subset)
        return changes.counts, _plan_of(prepared, subset, keep)


def _plan_of(prepared: PreparedJob, subset: Path, keep: Callable[[pa.RecordBatch], None]) -> PlanReport:
    with open_subset(subset) as rows:
        return dry_plan(prepared.spec, rows, prepared.tokenizer, prepared.max_model_len, keep)
