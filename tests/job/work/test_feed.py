"""Shards are claimed as they are needed, run in order, shared between workers, and exact even without claims."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bulkrun.job.plan.plan_view import PlanView
from bulkrun.job.store.claims import Claims
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.workers import LifeWatch
from bulkrun.job.views.verify import verify_run
from bulkrun.job.work.feed import Feed
from bulkrun.job.work.shard_work import open_shard, row_seed
from tests.job.fake_engine import FakeEngine
from tests.job.small_runs import Row, enter, job, make_rows, make_runner, oracle, results, start, write_plan
from tests.job.store.test_claims import worker
from tests.job.store.test_workers import Clock, beat


class Fed:
    """One worker's feed, used as a runner does."""

    def __init__(self, run: RunDir, name: str, spec: Any, clock: Clock) -> None:
        beat(run, worker(name), 1)
        self.plan = PlanView(run)
        self.opened: list[int] = []
        self._run, self._spec = run, spec
        self._feed = Feed(self.plan, Claims(run, worker(name), LifeWatch(run, clock=clock)), clock)

    def next_row(self) -> int | None:
        """The first row of the next generation, None while there is none."""
        while (generation := self._feed.next()) is None:
            if (shard := self._feed.claim()) is None:
                return None
            self.opened.append(shard)
            self._feed.give(open_shard(self._run, shard, self._spec.sampling))
        return generation.rows[0]


def test_a_shard_is_claimed_only_when_the_one_before_has_nothing_left_to_give(tmp_path: Path) -> None:
    spec, clock = job(tmp_path), Clock()
    run, _ = enter(tmp_path, spec)
    write_plan(run, make_rows(9, error_every=0, duplicate_every=0), 3)
    mine, yours = Fed(run, "me", spec, clock), Fed(run, "you", spec, clock)
    # Run order inside a shard is the plan's, here the reverse of the input's.
    assert [mine.next_row() for _ in range(4)] == [2, 1, 0, 5] and mine.opened == [0, 1]
    assert [yours.next_row() for _ in range(4)] == [8, 7, 6, None] and yours.opened == [2]
    assert [mine.next_row() for _ in range(3)] == [4, 3, None]


def test_a_dead_workers_shards_are_taken_over_after_a_while(tmp_path: Path) -> None:
    spec, clock = job(tmp_path), Clock()
    run, _ = enter(tmp_path, spec)
    write_plan(run, make_rows(3, error_every=0), 3)
    assert Fed(run, "dead", spec, clock).next_row() is not None
    mine = Fed(run, "me", spec, clock)
    assert mine.next_row() is None
    clock.now += 31
    assert mine.next_row() is not None and mine.opened == [0]


def test_another_adapters_shards_come_where_they_are_asked_for_and_then_at_once(tmp_path: Path) -> None:
    spec, clock = job(tmp_path), Clock()
    run, _ = enter(tmp_path, spec)
    rows = make_rows(12, error_every=0)
    write_plan(run, [replace(row, adapter="ab"[row.row // 3 % 2]) for row in rows], 3)
    beat(run, worker("me"), 1)
    feed = Feed(PlanView(run), Claims(run, worker("me"), LifeWatch(run, clock=clock)), clock)
    assert [feed.claim("b"), feed.claim("b"), feed.claim("b")] == [1, 3, None]
    assert feed.claim("b") is None, "the directory is not looked at again yet"
    assert [feed.claim("b", or_others=True) for _ in range(3)] == [0, 2, None]


def test_the_rest_of_a_shard_that_another_worker_committed_is_left_out(tmp_path: Path) -> None:
    spec = job(tmp_path)
    run, _ = enter(tmp_path, spec)
    write_plan(run, make_rows(6, error_every=0, duplicate_every=0), 3)
    mine = Fed(run, "me", spec, Clock())
    assert mine.next_row() == 2
    run.part(0).touch()
    mine.plan.refresh()
    assert mine.next_row() == 5


def test_one_look_at_the_directory_is_good_for_many_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, looks = job(tmp_path), list[Path]()
    run, _ = enter(tmp_path, spec)
    write_plan(run, make_rows(40, error_every=0, duplicate_every=0), 1)
    mine, parts = Fed(run, "me", spec, Clock()), RunDir.parts
    monkeypatch.setattr(RunDir, "parts", lambda self: looks.append(self.root) or parts(self))
    assert [mine.next_row() for _ in range(40)] == list(range(40)) and len(looks) == 1
    assert mine.next_row() is None and len(looks) == 2


def test_a_shard_that_another_worker_began_and_ended_since_the_look_is_left_out(tmp_path: Path) -> None:
    spec, clock = job(tmp_path), Clock()
    run, _ = enter(tmp_path, spec)
    write_plan(run, make_rows(4, error_every=0, duplicate_every=0), 1)
    mine, yours = Fed(run, "me", spec, clock), Fed(run, "you", spec, clock)
    assert mine.next_row() == 0 and yours.next_row() == 1 and yours.next_row() == 2
    run.part(1).touch()
    for claim in run.claims_of("shard-00001"):
        claim.unlink()
    assert mine.next_row() == 3 and not run.claims_of("shard-00001")


def test_a_shard_that_a_worker_died_with_is_not_left_to_the_end_of_a_long_plan(tmp_path: Path) -> None:
    spec, clock = job(tmp_path), Clock()
    run, _ = enter(tmp_path, spec)
    write_plan(run, make_rows(9, error_every=0, duplicate_every=0), 1)
    assert Fed(run, "dead", spec, clock).next_row() == 0
    mine = Fed(run, "me", spec, clock)
    assert [mine.next_row() for _ in range(3)] == [1, 2, 3]
    clock.now += 31
    assert [mine.next_row() for _ in range(3)] == [0, 4, 5]


def test_a_directory_with_nothing_to_claim_is_looked_at_twice_a_second(tmp_path: Path) -> None:
    spec, clock = job(tmp_path), Clock()
    run, _ = enter(tmp_path, spec)
    mine = Fed(run, "me", spec, clock)
    assert mine.next_row() is None
    write_plan(run, make_rows(3, error_every=0), 3)
    clock.now += 0.4
    assert mine.next_row() is None
    clock.now += 0.1
    assert mine.next_row() is not None


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
            make_runner(run, record, spec, engine).run()
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
