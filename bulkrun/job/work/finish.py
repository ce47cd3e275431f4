"""The end of a run: the totals must add up to the input, then `_SUCCESS` is published, once.

Any worker that sees the last part may finish; a finished run stays as it is. Reads footers only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from bulkrun.data.results.parts import PartInfo, read_part_info
from bulkrun.data.storage.durable import disk_errors
from bulkrun.data.storage.leftovers import TEMPORARIES, remove_old
from bulkrun.errors import RunError
from bulkrun.job.plan.plan_view import PlanView
from bulkrun.job.store.events import utc_now
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import RunRecord
from bulkrun.job.store.run_totals import RunTotals, publish_totals, read_totals
from bulkrun.job.work.commit import clear_shard_state
from bulkrun.scratch import sweep


def finish_run(run: RunDir, record: RunRecord) -> RunTotals:
    """Check the totals of a run whose every shard is committed and mark it finished. Safe to repeat.

    Raises RunError that says what is missing or too much.
    """
    totals = read_totals(run)
    if totals is None:
        plan = PlanView(run)
        plan.refresh()
        totals = publish_totals(run, add_up_parts(run, record, plan))
    clear_leftovers(run)
    return totals


def add_up_parts(run: RunDir, record: RunRecord, plan: PlanView) -> RunTotals:
    """The totals over all parts, checked against the plan. Raises RunError when they do not add up."""
    if plan.complete is None:
        raise RunError(f"{run.plan_complete}: missing: the plan is not complete; run the same command again")
    expected = set(range(plan.complete["shards"]))
    if plan.committed != expected:
        missing, extra = sorted(expected - plan.committed), sorted(plan.committed - expected)
        raise RunError(f"{run.root}: the plan has {len(expected)} shards; parts missing: {missing}, too many: {extra}")
    parts = [read_part_info(run.part(shard)) for shard in sorted(expected)]
    _check_parts(run, record, parts)
    input_rows = sum(part.input_rows for part in parts)
    if input_rows != plan.complete["rows"]:
        raise RunError(f"{run.root}: the input has {plan.complete['rows']} rows, the parts answer {input_rows}")
    # Above 0 where `_SUCCESS` is lost and a retry wrote parts anew: what it changes next must be newer than these.
    generation = max((part.generation for part in parts), default=0)
    return replace(sum_parts(record, parts), duplicate_ids=plan.duplicate_ids, generation=generation)


def _check_parts(run: RunDir, record: RunRecord, parts: list[PartInfo]) -> None:
    for part in parts:
        path = run.part(part.shard)
        if part.run_id != record.run_id:
            raise RunError(f"{path}: belongs to another run ({part.run_id}, this is {record.run_id}); move it away")
        if part.rows != part.input_rows * record.samples:
            raise RunError(f"{path}: {part.rows} output rows for {part.input_rows} rows x {record.samples} samples")


def sum_parts(record: RunRecord, parts: Sequence[PartInfo]) -> RunTotals:
    """The totals that the footers come to, unchecked."""
    errors: Counter[str] = Counter()
    for part in parts:
        errors.update(part.errors)
    return RunTotals(
        status="completed_with_errors" if errors else "completed",
        rows=sum(part.input_rows for part in parts),
        samples=record.samples,
        ok=sum(part.rows for part in parts) - errors.total(),
        errors=dict(errors.most_common()),
        prompt_tokens=sum(part.prompt_tokens for part in parts),
        completion_tokens=sum(part.completion_tokens for part in parts),
        saved_generations=sum(part.saved_generations for part in parts),
        cached_tokens=sum(part.cached_tokens for part in parts),
        stopped=sum(part.stopped for part in parts),
        cut=sum(part.cut for part in parts),
        parts=len(parts),
        run_id=record.run_id,
        started=record.created,
        finished=utc_now(),
        fingerprints=record.fingerprints,
        versions=record.versions,
    )


def clear_leftovers(run: RunDir) -> None:
    """What a late worker or a kill left of shards that are long committed, and temporary files."""
    for shard in run.journaled_shards():
        clear_shard_state(run, shard)
    for path in [*run.tmp.glob("*.tmp"), *map(run.flight_file, run.workers_in_flight())]:
        with disk_errors("removing", path):
            path.unlink(missing_ok=True)
    sweep(run.tmp)
    remove_old_temporaries(run)


def remove_old_temporaries(run: RunDir) -> None:
    """What killed processes left in any state of a run under hidden names, a day later; safe beside living ones."""
    for folder in (run.root, run.state, run.claims, run.plan, run.workers):
        remove_old(folder, TEMPORARIES)
    remove_old(run.root, ".bulkrun-*")  # of `check_place`
