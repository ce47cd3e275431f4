"""One view of many workers: what is committed counts once, what is open and the rates add up, the dead do not count."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from bulkrun.data.storage.durable import replace_json
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.workers import Worker, WorkerState
from bulkrun.job.views.team import TeamProgress, snapshot_of, sum_snapshots
from bulkrun.job.work.progress import ProgressSnapshot

ONE = ProgressSnapshot(
    rows_total=1000,
    rows_done=330,
    error_rows=13,
    prompt_tokens=3300,
    completion_tokens=660,
    rows_done_open=30,
    error_rows_open=3,
    prompt_tokens_open=300,
    completion_tokens_open=60,
    remaining_tokens=10_000,
    rows_per_s=5.0,
    prompt_tokens_per_s=60.0,
    completion_tokens_per_s=40.0,
    kv_cache_usage=0.5,
    num_running=8,
    num_waiting=16,
)


def test_committed_rows_count_once_and_open_rows_add_up() -> None:
    behind = replace(ONE, rows_done=220, rows_done_open=20, error_rows=7, error_rows_open=2, remaining_tokens=11_000)
    both = sum_snapshots([ONE, behind], elapsed_s=9.0)
    assert (both.rows_total, both.rows_done, both.error_rows) == (1000, 300 + 30 + 20, 10 + 3 + 2)
    assert (both.prompt_tokens, both.completion_tokens, both.remaining_tokens) == (3600, 720, 10_000)
    assert (both.num_running, both.num_waiting, both.kv_cache_usage, both.elapsed_s) == (16, 32, 0.5, 9.0)


def test_rates_add_up_and_the_time_left_follows_from_them() -> None:
    both = sum_snapshots([ONE, ONE], elapsed_s=1.0)
    assert (both.rows_per_s, both.prompt_tokens_per_s, both.completion_tokens_per_s) == (10.0, 120.0, 80.0)
    assert both.eta_s == 10_000 / 200
    assert sum_snapshots([ProgressSnapshot()], elapsed_s=1.0).eta_s is None


def test_a_plan_that_one_of_them_knows_to_be_complete_is() -> None:
    known = [replace(ONE, plan_complete=True), ONE]
    assert sum_snapshots(known, elapsed_s=1.0).plan_complete and not sum_snapshots([ONE], elapsed_s=1.0).plan_complete


def test_a_shard_open_twice_never_makes_more_than_all() -> None:
    assert sum_snapshots([replace(ONE, rows_total=340)] * 2, elapsed_s=1.0).rows_done == 340


def test_what_runs_make_is_known_with_any_of_their_workers() -> None:
    assert sum_snapshots([ONE, ONE], elapsed_s=1.0).generates
    assert not sum_snapshots([replace(ONE, generates=False), ONE], elapsed_s=1.0).generates
    assert not snapshot_of(replace(ONE, generates=False).to_json()).generates


def test_only_living_runners_count_whatever_version_they_are(tmp_path: Path) -> None:
    run, me = RunDir(tmp_path), Worker.this_process()
    run.workers.mkdir(parents=True)

    def beat(name: str, role: str = "runner", ended: str | None = None, pid: int = me.pid) -> None:
        worker = replace(me, id=name, pid=pid)
        progress = asdict(ONE) | {"a_number_of_the_future": 1}
        replace_json(run.workers / f"{name}.json", asdict(WorkerState(worker, 1, role, ended, progress=progress)))

    team = TeamProgress(run, clock=lambda: 5.0)
    assert team.snapshot() is None
    beat("planner", role="planner")
    beat("ended", ended="completed")
    beat("killed", pid=2**22 + 1)
    assert team.snapshot() is None
    beat("a")
    beat("b")
    shown = team.snapshot()
    assert shown is not None and shown.rows_per_s == 10.0
