"""What a run looks like from outside, from its files alone: any terminal, any node, no daemon, no torch.

A worker's age is the age of its heartbeat file by the clocks of this host and the file server: good enough to show,
never used to decide anything. Where these clocks cannot both be right, a second look tells whether it still beats.
"""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from bulkrun.data.results.parts import PartInfo, read_part_info
from bulkrun.errors import RunError
from bulkrun.job.plan.plan_view import PlanView
from bulkrun.job.store.journal import read_outcomes
from bulkrun.job.store.journal_files import journals_by_shard
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import RunRecord, read_record
from bulkrun.job.store.run_totals import RunTotals, read_totals
from bulkrun.job.store.workers import TTL_S, WorkerState, beats, read_worker, read_workers, silent_for
from bulkrun.job.update.cause import submit_command
from bulkrun.job.update.staging import update_under_way
from bulkrun.job.views.bucket_check import upload_command
from bulkrun.job.views.finished import lost_rows
from bulkrun.job.views.team import snapshot_of, sum_snapshots
from bulkrun.job.work.delivery import lacks_results
from bulkrun.job.work.progress import ProgressSnapshot
from bulkrun.settings import Task

State = Literal[
    "queued",
    "planning",
    "running",
    "interrupted",
    "undelivered",  # finished, but not all results are in the bucket
    "completed",
    "completed_with_errors",
    "failed",
    "stalled",
]
_AT_WORK = ("queued", "planning", "running")


@dataclass(frozen=True)
class WorkerStatus:
    """One process that works or worked on the run. `age_s` is the time since its last heartbeat."""

    id: str
    role: str
    pid: int
    alive: bool
    ended: str | None
    message: str | None
    age_s: float
    progress: dict[str, Any]


@dataclass(frozen=True)
class RunStatus:
    """A run at one moment. Rows are output rows (input rows x samples); None where not known yet."""

    root: Path
    state: State
    name: str
    run_id: str
    created: str
    rows_total: int | None
    rows_done: int
    error_rows: int
    prompt_tokens: int
    completion_tokens: int
    shards_total: int | None
    shards_committed: int
    plan_complete: bool
    workers: list[WorkerStatus]
    rows_per_s: float
    tokens_per_s: float
    eta_s: float | None
    last_commit_age_s: float | None
    message: str | None
    next_command: str
    totals: RunTotals | None
    update: RunStatus | None = None  # of the retry or incremental night under way
    cut: int = 0  # output rows that ended at the most tokens they could have
    duplicate_ids: int = 0
    random_weights: bool = False
    task: Task = "generate"
    samples: int = 1


def read_status(run: RunDir) -> RunStatus:
    """Look at a run. Raises RunError when the directory is not a run or is damaged."""
    record, totals = read_record(run), read_totals(run)
    plan = PlanView(run)
    plan.refresh()
    parts = [read_part_info(run.part(shard)) for shard in sorted(plan.committed)]
    journaled, failed = _open_rows(run, plan, record) if totals is None else (0, 0)
    workers = [_worker_status(run, state) for state in read_workers(run)]
    state, message = _state(run, record, totals, plan, workers)
    staged = _read_update(run, record)
    return RunStatus(
        root=run.root,
        state=state,
        name=str(record.job["name"]),
        run_id=record.run_id,
        created=record.created,
        rows_total=_rows_total(record, totals, plan),
        rows_done=sum(part.rows for part in parts) + journaled,
        error_rows=sum(part.error_rows for part in parts) + failed,
        prompt_tokens=sum(part.prompt_tokens for part in parts),
        completion_tokens=sum(part.completion_tokens for part in parts),
        shards_total=totals.parts if totals else plan.complete["shards"] if plan.complete else None,
        shards_committed=len(plan.committed),
        plan_complete=plan.complete is not None,
        workers=workers,
        **_speed(workers),
        last_commit_age_s=_last_commit_age(run, parts),
        message=message,
        next_command=staged.next_command if staged else next_command(run, record, state),
        totals=totals,
        update=staged,
        cut=sum(part.cut for part in parts),
        duplicate_ids=totals.duplicate_ids if totals else plan.duplicate_ids,
        random_weights=record.has_random_weights,
        task=record.task,
        samples=record.samples,
    )


def _read_update(run: RunDir, record: RunRecord) -> RunStatus | None:
    """The retry or night under way in a run; what continues it is a command on the run."""
    update = update_under_way(run)
    if update is None:
        return None
    try:
        staged = read_status(run.staged)
    except RunError:
        if run.staged.run_json.exists():
            raise
        return None  # it was merged just now
    at_work = staged.state in _AT_WORK
    return replace(staged, next_command=next_command(run, record, staged.state) if at_work else update.command(run))


def _rows_total(record: RunRecord, totals: RunTotals | None, plan: PlanView) -> int | None:
    """Output rows; in a finished run those that are there, which may not be those of its plan any more."""
    if totals is not None:
        return totals.rows * record.samples
    return plan.complete["rows"] * record.samples if plan.complete else None


def _open_rows(run: RunDir, plan: PlanView, record: RunRecord) -> tuple[int, int]:
    """Output rows journaled in shards that are not committed, and how many of them are errors."""
    done = failed = 0
    journals = journals_by_shard(run)
    for shard in plan.open_shards:
        records = read_outcomes(journals.get(shard, [])).answered.values()
        done += len(records)
        failed += sum(record.error_code is not None for record in records)
    from bulkrun.job.jobfile.spec import JobSpec  # a quarter of the start of `status`, and asked of unfinished runs

    # Of best_of outputs a row keeps n; which ones is known when all are there.
    sampling = JobSpec.model_validate(record.job).sampling
    return done * sampling.n // sampling.generations, failed * sampling.n // sampling.generations


def _worker_status(run: RunDir, state: WorkerState) -> WorkerStatus:
    age = silent_for(run, state.worker.id)
    alive = not state.gone and beats(run, state)
    worker = state.worker
    return WorkerStatus(worker.id, state.role, worker.pid, alive, state.ended, state.message, age, state.progress)


def _state(
    run: RunDir, record: RunRecord, totals: RunTotals | None, plan: PlanView, workers: list[WorkerStatus]
) -> tuple[State, str | None]:
    """The state, and why when it is a bad one."""
    if totals is not None:
        return _finished_state(run, record, totals, at_work=any(worker.alive for worker in workers))
    if any(worker.alive for worker in workers):
        return ("running" if plan.shards else "planning"), None
    others = [worker for worker in workers if worker.role != "planner"]  # whose failure its parent tells too
    last = min(others or workers, key=lambda worker: worker.age_s, default=None)
    if last is None:
        return "interrupted", "no worker has started yet"
    if last.ended == "failed":
        return "failed", last.message
    if last.ended is None and _silent_but_there(run, last):
        return "stalled", f"worker {last.id} (process {last.pid}) has been silent for {last.age_s:.0f} s"
    return "interrupted", None if last.ended else f"worker {last.id} (process {last.pid}) was killed"


def _finished_state(run: RunDir, record: RunRecord, totals: RunTotals, *, at_work: bool) -> tuple[State, str | None]:
    if (lost := lost_rows(run, totals)) is not None:
        return "failed", lost
    if not lacks_results(run, record):
        return totals.status, None
    if at_work:
        return "running", f"all rows are done, the results are being uploaded to {record.bucket_url}"
    return "undelivered", f"all rows are done, but not all results are in {record.bucket_url}"


def _silent_but_there(run: RunDir, worker: WorkerStatus) -> bool:
    """Whether a silent worker may still exist (hung, or on a node that cannot be asked)."""
    state = read_worker(run, worker.id)
    return worker.age_s >= TTL_S and not (state is not None and state.gone)


def _speed(workers: list[WorkerStatus]) -> dict[str, Any]:
    """All live workers together, by the sums that `watch` shows."""
    reports = [worker.progress for worker in workers if worker.alive and worker.progress]
    team = sum_snapshots([snapshot_of(report) for report in reports], elapsed_s=0.0) if reports else ProgressSnapshot()
    tokens = team.prompt_tokens_per_s + team.completion_tokens_per_s
    return {"rows_per_s": team.rows_per_s, "tokens_per_s": tokens, "eta_s": team.eta_s}


def _last_commit_age(run: RunDir, parts: list[PartInfo]) -> float | None:
    newest = max((run.part(part.shard).stat().st_mtime for part in parts), default=None)
    return None if newest is None else max(0.0, time.time() - newest)


def first_look(root: str, record: RunRecord) -> str:
    """The query that shows some results; of a vector, which fills a screen, its beginning, of several that of the
    first. `root` is quoted."""
    columns = "*"
    if record.task == "embed" and not record.job["prompt"].get("score_lines"):
        several = bool(record.job["prompt"].get("text_lists"))
        columns = f"* REPLACE ({'embeddings[1][:4] AS embeddings' if several else 'embedding[:4] AS embedding'})"
    return f'bulkrun query {root} "SELECT {columns} FROM results LIMIT 5"'


def next_command(run: RunDir, record: RunRecord, state: State) -> str:
    """What to type next, as a shell takes it."""
    root = shlex.quote(str(run.root))
    if state in _AT_WORK:
        return f"bulkrun {'status' if state == 'queued' else 'watch'} {root}"
    if state == "undelivered":
        return upload_command(run)
    if state == "completed":
        return first_look(root, record)
    if state == "completed_with_errors":
        return f"bulkrun errors {root}"
    if read_totals(run) is not None:
        return f"bulkrun verify {root}"
    return submit_command(run, record)
