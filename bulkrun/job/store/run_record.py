"""`.bulkrun/run.json`: which job a directory holds the run of, and the one gate through which a run is entered.

A new directory gets a record by exclusive publish; a directory with a record is continued when nothing that results
depend on has changed, and refused with the difference when something has. Nothing is ever deleted: `--fresh` renames
the whole old directory. Knows no engine and reads no input.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from bulkrun.data.storage.documents import from_document
from bulkrun.data.storage.durable import (
    make_dirs,
    read_json,
    remove_tree,
    replace_json,
    write_new_json,
)
from bulkrun.data.storage.remote import insist, is_remote
from bulkrun.errors import BulkrunError, ResumeError, RunError, UsageError
from bulkrun.job.store.aside import move_aside, refuse_live_workers
from bulkrun.job.store.bucket_owner import own_prefix, refuse_fresh, refuse_used_prefix
from bulkrun.job.store.difference_lines import difference_lines
from bulkrun.job.store.events import utc_now
from bulkrun.job.store.fingerprint import HARMLESS, Facts, differences, fingerprint, identity_of, key_salt, task_of
from bulkrun.job.store.object_store import ObjectPrefix
from bulkrun.job.store.replaced import replaced_error
from bulkrun.job.store.run_dir import RunDir, make_state_dirs
from bulkrun.job.store.workers import LifeWatch, read_workers
from bulkrun.settings import Task

FORMAT = 2


@dataclass(frozen=True)
class RunRecord:
    """A run's birth certificate. `job` is the resolved spec as plain data, `identity` what results depend on."""

    run_id: str
    created: str
    job: dict[str, Any]
    identity: dict[str, dict[str, Any]]
    job_file: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT
    overrides: list[str] = field(default_factory=list)  # the --set values of the command

    @property
    def fingerprints(self) -> dict[str, str]:
        """A hash of each section of what decides the results: says where a job differs."""
        return {section: fingerprint(values) for section, values in self.identity.items()}

    @property
    def plan_hash(self) -> str:
        """One hash over everything that decides the plan and the results."""
        return fingerprint(self.identity)

    @property
    def samples(self) -> int:
        """Output rows of each input row."""
        return int(self.job["sampling"]["n"])

    @property
    def task(self) -> Task:
        """What it makes of its rows."""
        return task_of(self.job)

    @property
    def has_random_weights(self) -> bool:
        """Whether its texts are noise."""
        return bool(self.job["engine"].get("load_format") == "dummy")

    @property
    def key_salt(self) -> str | None:
        """What the row keys of an incremental run have in common; None where rows have no keys."""
        return key_salt(self.identity) if self.job["run"].get("incremental") else None

    @property
    def bucket_url(self) -> str | None:
        """Where the results go beside the run's directory; None for most runs."""
        url = str(self.job["output"]["path"]).rstrip("/")
        return url if is_remote(url) else None

    def bucket(self) -> ObjectPrefix | None:
        """The objects there. Raises RunError where s3fs is not installed."""
        return ObjectPrefix(self.bucket_url) if self.bucket_url else None

    def id_column(self, columns: Sequence[str]) -> str | None:
        """The one of the results' columns that names rows: the job's own, or that of an OpenAI batch."""
        wanted = self.job["input"]["id"] or "custom_id"
        return wanted if wanted in columns else None


def new_record(
    job: Mapping[str, Any],
    *,
    input_facts: Facts,
    model_facts: Facts,
    versions: Mapping[str, str],
    job_file: str | None = None,
    overrides: Sequence[str] = (),
) -> RunRecord:
    """The record a new run of this resolved job (`JobSpec.model_dump()`) would get."""
    identity = identity_of(job, input_facts, model_facts)
    made = RunRecord(secrets.token_hex(8), utc_now(), dict(job), identity, job_file, dict(versions))
    return replace(made, overrides=list(overrides))


def read_record(run: RunDir) -> RunRecord:
    """The record of an existing run. Raises RunError when the directory is no run, or of another bulkrun."""
    document = read_json(run.run_json)
    if document is None:
        raise RunError(f"{run.root}: not a run: it has no .bulkrun/run.json; RUN is the output.path of a job")
    found = document.pop("format", None)
    document.pop("fingerprints", None)
    if found != FORMAT:
        raise RunError(
            f"{run.run_json}: has format {found}, this bulkrun knows {FORMAT}; use the version it was made with, or "
            "start over with --fresh, which moves it aside"
        )
    return from_document(RunRecord, document, run.run_json, "a run record")


def read_own_record(run: RunDir, run_id: str) -> RunRecord:
    """The record of a run for a process that was started for it. Raises RunError when the directory holds another."""
    if not run.run_json.exists():
        raise replaced_error(run)
    record = read_record(run)
    if record.run_id != run_id:
        raise replaced_error(run)
    return record


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


def record_document(record: RunRecord) -> dict[str, Any]:
    """The contents of run.json."""
    return {**asdict(record), "fingerprints": record.fingerprints}


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
    """A run without a shard (its first start failed, or its input was empty) holds nothing to protect: it takes the
    corrected job. The plan of no rows goes before the old record does, so that no kill leaves it to the new one."""
    refuse_live_workers(run)
    if wanted.bucket_url:
        wanted = replace(wanted, run_id=old.run_id)  # the bucket knows it as its owner
    for stale in (run.plan_complete, run.sql_snapshot):
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
