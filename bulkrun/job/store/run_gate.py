"""The one gate through which a run is entered: made, continued, refused, or started anew.

A new directory gets a record by exclusive publish; a directory with a record is continued when nothing that results
depend on has changed, and refused with the difference when something has. Nothing is ever deleted: `--fresh` renames
the whole old directory. Knows no engine and reads no input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bulkrun.data.storage.durable import disk_errors, make_dirs, remove_tree, replace_json, write_new_json
from bulkrun.data.storage.remote import insist, is_remote
from bulkrun.errors import BulkrunError, ResumeError, RunError, UsageError
from bulkrun.job.store.aside import move_aside, refuse_live_workers
from bulkrun.job.store.bucket_owner import own_prefix, refuse_fresh, refuse_used_prefix
from bulkrun.job.store.difference_lines import difference_lines
from bulkrun.job.store.fingerprint import HARMLESS, differences
from bulkrun.job.store.run_dir import RunDir, make_state_dirs
from bulkrun.job.store.run_record import RunRecord, read_record, record_document
from bulkrun.job.store.workers import LifeWatch, read_workers


def start_anew(run: RunDir, wanted: RunRecord) -> Path | None:
    """Where an earlier run was moved to, None without one. Raises ResumeError for a bucket, RunError under a worker."""
    if bucket := wanted.bucket():
        insist(partial(refuse_fresh, bucket))
    return move_aside(run)


def open_run(run: RunDir, wanted: RunRecord, *, resume_anyway: bool = False) -> RunRecord:
    """Enter the run of `wanted` in this directory, making it if there is none.

    Returns the record that is on disk now: the old one with the new engine and pace settings when a run continues,
    `wanted` when nothing was planned before.
    Raises ResumeError (with a readable difference) when the job or its input changed, UsageError when the directory
    holds something else. The same holds for the bucket that results go to.
    """
    bucket = wanted.bucket()
    if not run.run_json.exists():
        refuse_foreign_files(run)
        if bucket:
            insist(partial(refuse_used_prefix, bucket))
    record = _create_or_continue(run, wanted, resume_anyway)
    if bucket and not run.success.exists():
        insist(partial(own_prefix, bucket, record.run_id, run))
    return record


def _create_or_continue(run: RunDir, wanted: RunRecord, resume_anyway: bool) -> RunRecord:
    if not run.run_json.exists() and _create(run, wanted):
        return wanted
    return _continue(run, read_record(run), wanted, resume_anyway)


def _create(run: RunDir, wanted: RunRecord) -> bool:
    make_dirs(run.root)
    make_dirs(run.state, mode=0o700)
    make_state_dirs(run)
    return write_new_json(run.run_json, record_document(wanted))


def refuse_foreign_files(run: RunDir) -> None:
    """A directory that is not empty and not a run is somebody's: nothing is written into it."""
    try:
        _refuse_what_is_there(run)
    except BulkrunError:
        if not run.run_json.exists():  # else another process made the run meanwhile: what was seen is that run's
            raise


def _refuse_what_is_there(run: RunDir) -> None:
    if run.root.exists() and not run.root.is_dir():
        raise UsageError(f"{run.root}: output.path is a file; choose a directory")
    entries = run.root.iterdir() if run.root.is_dir() else ()
    foreign = sorted(path.name for path in entries if not path.name.startswith(".") and path.name != "lost+found")
    if foreign:
        shown = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        raise UsageError(
            f"{run.root}: holds files that do not belong to a run ({shown}) and no .bulkrun/run.json; "
            "choose an empty or new directory as output.path"
        )
    if any(run.journal.glob("shard-*")) or any(run.plan.glob("shard-*")):
        raise RunError(f"{run.run_json}: missing, but the run has a plan; restore it, or use --fresh")


def _continue(run: RunDir, old: RunRecord, wanted: RunRecord, resume_anyway: bool) -> RunRecord:
    _refuse_other_bucket(run, old, wanted)
    make_state_dirs(run)
    changed = differences(old.identity, wanted.identity)
    if changed and not (run.planned_shards() or run.committed_shards()):
        return _begin_again(run, old, wanted)
    _refuse_lost_totals(run)
    harmful = [key for key in changed if key not in HARMLESS]
    if harmful or (changed and not resume_anyway):
        raise ResumeError(_explain(run, changed, harmless=not harmful))
    record = replace(old, job=_keep_plan_settings(wanted.job, old.job), versions=wanted.versions)
    if wanted.job_file is not None:
        record = replace(record, job_file=wanted.job_file, overrides=wanted.overrides)
    if record != old:
        replace_json(run.run_json, record_document(record))
    return record


def _refuse_other_bucket(run: RunDir, old: RunRecord, wanted: RunRecord) -> None:
    """A state directory belongs to the results in one bucket."""
    before, now = (str(record.job["output"]["path"]).rstrip("/") for record in (old, wanted))
    if before != now and (is_remote(before) or is_remote(now)):
        raise ResumeError(f"{run.root}: holds the state of the results in {before}, not {now}; choose another one")


def _refuse_lost_totals(run: RunDir) -> None:
    """The plan does not tell what is done in a run that was changed after its end: only `_SUCCESS` does."""
    if run.success.exists() or not run.plan_complete.exists():
        return
    if foreign := sorted(run.committed_shards() - run.planned_shards()):
        raise RunError(
            f"{run.success}: missing, and part {foreign[0]} is not in the plan: the run was compacted or updated after "
            "its end; restore _SUCCESS from a backup, or start over with --fresh"
        )


def _begin_again(run: RunDir, old: RunRecord, wanted: RunRecord) -> RunRecord:
    """A run without a shard (its first start failed, or its input was empty) holds nothing to protect.

    It takes the corrected job. The plan of no rows goes before the old record does, so that no kill leaves it to the
    new one.
    """
    refuse_live_workers(run)
    if wanted.bucket_url:
        wanted = replace(wanted, run_id=old.run_id)  # the bucket knows it as its owner
    for stale in (run.plan_complete, run.sql_snapshot):
        with disk_errors("removing", stale):
            stale.unlink(missing_ok=True)
    replace_json(run.run_json, record_document(wanted))
    return wanted


def forget_start(run: RunDir, record: RunRecord, *, with_root: bool) -> None:
    """Remove what a start that failed before anything was planned made: the state, and `with_root` the directory too.

    Nothing is removed where somebody else entered the run meanwhile, or where its results go to a bucket, which knows
    its owner. The record goes first: without it the rest is nothing.
    """
    begun = run.planned_shards() or run.committed_shards() or any(run.journal.glob("shard-*"))
    if begun or record.bucket() or read_record(run).run_id != record.run_id:
        return
    life = LifeWatch(run)
    if any(life.alive(state.worker) for state in read_workers(run)):
        return
    run.run_json.unlink()
    remove_tree(run.state)
    if with_root and not any(run.root.iterdir()):
        run.root.rmdir()


def _keep_plan_settings(job: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """A half-made plan goes on with the windows and shards it began with."""
    run = {**job["run"], "window_rows": old["run"]["window_rows"]}
    return {**job, "run": run, "output": {**job["output"], "rows_per_file": old["output"]["rows_per_file"]}}


def _explain(run: RunDir, changed: Mapping[str, tuple[Any, Any]], *, harmless: bool) -> str:
    lines = [f"{run.root}: this run was started with other settings or other input:"]
    lines += difference_lines(changed)
    if harmless:
        lines.append("The results do not depend on these: --resume-anyway continues the run.")
    lines.append("--fresh moves the old results aside and starts over; another output.path keeps both.")
    return "\n".join(lines)
