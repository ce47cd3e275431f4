"""Shards are claimed as they are needed, run in order, shared between workers, and exact even without claims."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from bulkrun.job.plan.plan_view import PlanView
from bulkrun.job.store.claims import Claims
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.workers import LifeWatch
from bulkrun.job.views.verify import verify_run
from bulkrun.job.work.feed import Feed
from bulkrun.job.work.runner import JobRunner
from bulkrun.job.work.shard_work import open_shard, row_seed
from tests.job.fake_engine import FakeEngine, decode
from tests.job.small_runs import Row, enter, job, make_rows, oracle, results, start, write_plan
from tests.job.store.test_claims import worker
from tests.job.store.test_workers import Clock, beat


def feed_of(run: RunDir, name: str, opened: list[int], spec: Any, clock: Clock) -> Feed:
    def opening(shard: int) -> Any:
        opened.append(shard)
        return open_shard(run, shard, spec.sampling)

    beat(run, worker(name), 1)
    return Feed(PlanView(run), Claims(run, worker(name), LifeWatch(run, clock=clock)), opening, clock)


def test_a_shard_is_opened_only_when_the_one_before_has_nothing_left_to_give(tmp_path: Path) -> None:
    spec, opened, theirs, clock = job(tmp_path), list[int](), list[int](), Clock()
    run, _ = enter(tmp_path, spec)
    write_plan(run, make_rows(9, error_every=0, duplicate_every=0), 3)
    feed = feed_of(run, "me", opened, spec, clock)
    # Run order inside a shard is the plan's, here the reverse of the input's.
    assert [feed.next().rows[0] for _ in range(4)] == [2, 1, 0, 5] and opened == [0, 1]  # type: ignore[union-attr]
    other = feed_of(run, "you", theirs, spec, clock)
    assert [other.next().rows[0] for _ in range(3)] == [8, 7, 6] and theirs == [2]  # type: ignore[union-attr]
    assert other.next() is None
    assert [feed.next().rows[0] for _ in range(2)] == [4, 3] and feed.next() is None  # type: ignore[union-attr]


def test_a_dead_workers_shards_are_taken_over_after_a_while(tmp_path: Path) -> None:
    spec, opened, clock = job(tmp_path), list[int](), Clock()
    run, _ = enter(tmp_path, spec)
    write_plan(run, make_rows(3, error_every=0), 3)
    assert feed_of(run, "dead", [], spec, clock).next() is not None
    feed = feed_of(run, "me", opened, spec, clock)
    assert feed.next() is None
    clock.now += 31
    assert feed.next() is not None and opened == [0]


def test_the_rest_of_a_shard_that_another_worker_committed_is_left_out(tmp_path: Path) -> None:
    spec, clock = job(tmp_path), Clock()
    run, _ = enter(tmp_path, spec)
    write_plan(run, make_rows(6, error_every=0, duplicate_every=0), 3)
    plan = PlanView(run)
    claims = Claims(run, worker("me"), LifeWatch(run, clock=clock))
    feed = Feed(plan, claims, lambda shard: open_shard(run, shard, spec.sampling), clock)
    assert feed.next().rows == (2,)  # type: ignore[union-attr]
    run.part(0).touch()
    plan.refresh()
    assert feed.next().rows == (5,)  # type: ignore[union-attr]


def test_a_directory_with_nothing_to_claim_is_looked_at_twice_a_second(tmp_path: Path) -> None:
    spec, opened, clock = job(tmp_path), list[int](), Clock()
    run, _ = enter(tmp_path, spec)
    feed = feed_of(run, "me", opened, spec, clock)
    assert feed.next() is None
    write_plan(run, make_rows(3, error_every=0), 3)
    clock.now += 0.4
    assert feed.next() is None
    clock.now += 0.1
    assert feed.next() is not None


def test_the_noise_of_a_row_is_63_bits_of_seed_id_and_sample() -> None:
    seeds = {row_seed(seed, row_id, sample) for seed in (0, 1) for row_id in ("1", "11") for sample in (0, 1)}
    assert len(seeds) == 8 and all(0 <= seed < 2**63 for seed in seeds)
    assert row_seed(0, "a", 0) == row_seed(0, "a", 0) == 4511623774499008519


def run_together(path: Path, rows: list[Row], spec: Any, workers: int) -> None:
    """Several workers of one run, as threads of this process."""
    run, record = enter(path, spec)
    write_plan(run, rows, 8, samples=spec.sampling.n)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        engine = FakeEngine(3 + number, step_s=0.001)
        try:
            JobRunner(run, record, spec, engine, decode, rebuild_engine=lambda: engine).run()
        except BaseException as failure:
            failures.append(failure)
            raise

    threads = [threading.Thread(target=work, args=(number,)) for number in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_workers_share_a_run_and_both_end_with_it(tmp_path: Path) -> None:
    rows, spec = make_rows(90), job(tmp_path, n=2, temperature=0.9)
    run_together(tmp_path, rows, spec, workers=3)
    assert results(tmp_path) == oracle(rows, spec) and verify_run(RunDir(tmp_path)).ok


def test_without_any_claims_two_workers_on_every_shard_are_still_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Claims, "take", lambda self, name: True)
    rows, spec = make_rows(90), job(tmp_path)
    run_together(tmp_path, rows, spec, workers=2)
    assert results(tmp_path) == oracle(rows, spec) and verify_run(RunDir(tmp_path)).ok


@pytest.mark.parametrize("shard_rows", [5, 40])
def test_results_do_not_depend_on_shards_batch_size_or_workers(tmp_path: Path, shard_rows: int) -> None:
    rows, spec = make_rows(40), job(tmp_path / "out", temperature=1.0, n=2)
    start(tmp_path / "out", rows, spec, shard_rows=shard_rows, engine=FakeEngine(1 + shard_rows))
    assert results(tmp_path / "out") == oracle(rows, spec)
