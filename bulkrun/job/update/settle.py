"""Giving up a plan without giving up what is finished: rows that are journaled become parts, the rest is forgotten.

For an incremental run whose input changed before it was done, or whose `_SUCCESS` is lost: what is missing is found
again by the next comparison.
Every step can be repeated; a marker in the run's state says that it was begun. Knows no input.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bulkrun.data.results.parts import read_part_columns, read_part_info
from bulkrun.data.storage.durable import write_new_json
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.plan.plan_view import is_outdated
from bulkrun.job.store.events import log_event
from bulkrun.job.store.journal_files import journals_by_shard
from bulkrun.job.store.replaced import OwnRun
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import RunRecord, read_record
from bulkrun.job.store.run_totals import RunTotals, publish_totals
from bulkrun.job.update.compatibility import only_the_input_changed
from bulkrun.job.update.merge import merge
from bulkrun.job.update.staging import is_merging
from bulkrun.job.update.update_claim import refuse_lost_hold
from bulkrun.job.work.commit import RunIdentity, commit_answered
from bulkrun.job.work.finish import clear_leftovers, sum_parts


def settle_run(run: RunDir, record: RunRecord) -> RunTotals:
    """End an unfinished run with the rows that it has; nobody else may be at work in it (`hold`)."""
    refuse_lost_hold(run)
    write_new_json(run.settling, {"run_id": record.run_id})
    _commit_answered(run, record)
    infos = [read_part_info(path) for path in run.parts().values()]
    generation = 1 + max((info.generation for info in infos), default=0)
    totals = replace(sum_parts(record, infos), generation=generation, next_row=_rows_used(run))
    refuse_lost_hold(run)
    totals = publish_totals(run, totals)
    clear_leftovers(run)
    log_event(run, "-", "settled", rows=totals.rows)
    return totals


def must_settle(run: RunDir, record: RunRecord, wanted: RunRecord) -> bool:
    """Whether the plan of an unfinished run of `record` cannot finish it as `wanted`, so that it ends with its rows.

    Its input changed before it was done, or its totals are lost, maybe with all that a later night made.
    """
    begun = bool(run.planned_shards() or run.committed_shards())
    return _is_settling(run) or (begun and (only_the_input_changed(record, wanted) or is_outdated(run, record)))


def settle_update(run: RunDir) -> RunTotals:
    """Merge what a staged run has finished so far. No worker may be alive in it."""
    refuse_lost_hold(run)
    if not is_merging(run) and run.staged.run_json.exists():
        _commit_answered(run.staged, read_record(run.staged))
    return merge(run)


def _is_settling(run: RunDir) -> bool:
    """Whether only the rows that are there count, whatever the plan says: a kill came between, or `_SUCCESS` is lost
    and parts were made after the plan's end."""
    if run.success.exists():
        return False
    return (run.settling).exists() or any(read_part_info(path).generation for path in run.parts().values())


def _commit_answered(run: RunDir, record: RunRecord) -> None:
    identity = RunIdentity.of(record, JobSpec.model_validate(record.job))
    journals, own = journals_by_shard(run), OwnRun(run, record.run_id)
    for shard in sorted(run.planned_shards() - run.committed_shards()):
        commit_answered(run, shard, identity, journals.get(shard, []), own.check)


def _rows_used(run: RunDir) -> int:
    """The first row number that no result has."""
    tables = (table for path in run.parts().values() for table in read_part_columns(path, ["row"]))
    return 1 + max((int(np.max(table["row"].to_numpy())) for table in tables if table.num_rows), default=-1)
