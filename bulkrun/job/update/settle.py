"""Giving up a plan without giving up what is finished: rows that are journaled become parts, the rest is forgotten.

For an incremental run whose input changed before it was done: what is missing is found again by the next comparison.
Every step can be repeated; a marker in the run's state says that it was begun. Knows no input.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bulkrun.data.parts import read_part_columns, read_part_info
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.store.durable import replace_json, write_new_json
from bulkrun.job.store.events import log_event
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import RunRecord, read_record
from bulkrun.job.update.gate import only_the_input_changed
from bulkrun.job.update.merge import merge
from bulkrun.job.update.staging import is_merging
from bulkrun.job.work.commit import commit_answered, identity_of
from bulkrun.job.work.finish import RunTotals, sum_parts, totals_document

_MARKER = "settling.json"


def settle_run(run: RunDir, record: RunRecord) -> RunTotals:
    """End an unfinished run with the rows that it has. No worker may be alive in it."""
    write_new_json(run.state / _MARKER, {"run_id": record.run_id})
    _commit_answered(run, record)
    infos = [read_part_info(path) for path in run.parts().values()]
    totals = replace(sum_parts(record, infos), generation=1, next_row=_rows_used(run))
    replace_json(run.success, totals_document(totals))
    log_event(run, "-", "settled", rows=totals.rows)
    return totals


def is_settling(run: RunDir) -> bool:
    """Whether a kill came between: only the rows that are there count, whatever the plan says."""
    return (run.state / _MARKER).exists() and not run.success.exists()


def must_settle(run: RunDir, record: RunRecord, wanted: RunRecord) -> bool:
    """Whether an unfinished first run of `record` cannot be finished as `wanted`, but ended with the rows it has."""
    begun = bool(run.planned_shards() or run.committed_shards())
    return is_settling(run) or (begun and only_the_input_changed(record, wanted))


def settle_update(run: RunDir) -> RunTotals:
    """Merge what a staged run has finished so far. No worker may be alive in it."""
    if not is_merging(run) and run.staged.run_json.exists():
        _commit_answered(run.staged, read_record(run.staged))
    return merge(run)


def _commit_answered(run: RunDir, record: RunRecord) -> None:
    identity = identity_of(record, JobSpec.model_validate(record.job))
    for shard in sorted(run.planned_shards() - run.committed_shards()):
        commit_answered(run, shard, identity)


def _rows_used(run: RunDir) -> int:
    """The first row number that no result has."""
    tables = (table for path in run.parts().values() for table in read_part_columns(path, ["row"]))
    return 1 + max((int(np.max(table["row"].to_numpy())) for table in tables if table.num_rows), default=-1)
