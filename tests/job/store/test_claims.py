"""Claims: one holder at a time while it lives, and the next epoch for whoever follows a dead one."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from bulkrun.data.storage.durable import replace_json
from bulkrun.job.store.claims import Claims
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.workers import LifeWatch, Worker
from tests.job.store.test_workers import Clock, beat


def worker(name: str) -> Worker:
    return Worker(name, "another machine", 1, "0")


def claims_of(run: RunDir, name: str, clock: Clock) -> Claims:
    return Claims(run, worker(name), LifeWatch(run, ttl_s=30, clock=clock))


def test_a_claim_keeps_others_out_while_its_worker_lives(run: RunDir) -> None:
    clock = Clock()
    mine, yours = claims_of(run, "me", clock), claims_of(run, "you", clock)
    beat(run, worker("me"), 1)
    assert mine.take("shard-00001") and mine.take("shard-00001")
    assert not yours.take("shard-00001")
    assert yours.take("shard-00002")


def test_a_dead_workers_claim_is_taken_over_by_exactly_one_with_the_next_epoch(run: RunDir) -> None:
    clock = Clock()
    dead, first, second = (claims_of(run, name, clock) for name in ("dead", "first", "second"))
    beat(run, worker("dead"), 1)
    beat(run, worker("first"), 1)
    assert dead.take("plan")
    assert not first.take("plan") and not second.take("plan")
    clock.now += 31
    assert first.take("plan") and not second.take("plan")
    assert {path.name for path in run.claims.iterdir()} == {"plan.1", "plan.2"}


def test_what_others_hold_is_told_by_one_look_at_each_of_them(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    dead, mine, yours = (claims_of(run, name, clock) for name in ("dead", "me", "you"))
    for name in ("dead", "me", "you"):
        beat(run, worker(name), 1)
    assert all(dead.take_shard(shard) for shard in (1, 2)) and all(yours.take_shard(shard) for shard in range(3, 30))
    assert mine.take_shard(30) and not mine.take_shard(1) and not yours.take_shard(1)
    clock.now += 31
    beat(run, worker("you"), 2)
    assert yours.take_shard(2), "its second claim counts"
    asked, alive = list[str](), LifeWatch.alive
    monkeypatch.setattr(LifeWatch, "alive", lambda self, one: asked.append(one.id) or alive(self, one))
    assert list(mine.free_shards(iter(range(32)))) == [0, 1, 30, 31]
    assert sorted(asked) == ["dead", "you"]


def test_names_that_begin_alike_are_different(run: RunDir) -> None:
    clock = Clock()
    beat(run, worker("me"), 1)
    assert claims_of(run, "me", clock).take("shard-00001")
    assert claims_of(run, "you", clock).take("shard-0000")


def test_an_empty_claim_file_is_free(run: RunDir) -> None:
    (run.claims / "plan.3").touch()
    assert claims_of(run, "me", Clock()).take("plan")
    assert (run.claims / "plan.4").exists()


def test_who_gives_a_claim_up_leaves_none_of_the_dead_behind_and_takes_nobody_elses(run: RunDir) -> None:
    clock = Clock()
    dead, mine, yours = (claims_of(run, name, clock) for name in ("dead", "me", "you"))
    beat(run, worker("me"), 1)
    assert dead.take("update") and dead.take("plan") and not mine.take("update")
    clock.now += 31
    assert mine.take("update")
    yours.release("update")
    assert {path.name for path in run.claims.iterdir()} == {"update.1", "update.2", "plan.1"}
    mine.release("update")
    assert {path.name for path in run.claims.iterdir()} == {"plan.1"}


def test_a_claim_of_a_newer_version_is_as_alive_as_its_owner(run: RunDir) -> None:
    beat(run, worker("old"), 1)
    replace_json(run.claims / "shard-0.1", {**asdict(worker("old")), "rack": 7})
    claims = Claims(run, worker("new"), LifeWatch(run))
    assert not claims.take("shard-0")
    beat(run, worker("old"), 2, ended="completed")
    assert claims.take("shard-0")


def test_a_name_that_was_given_up_and_taken_again_is_its_new_owners(run: RunDir) -> None:
    clock = Clock()
    first, second, waiting = (claims_of(run, name, clock) for name in ("first", "second", "waiting"))
    beat(run, worker("first"), 1)
    assert first.take("update") and not waiting.take("update")
    first.release("update")
    clock.now += 31
    beat(run, worker("second"), 1)
    assert second.take("update")
    assert not waiting.take("update"), "it saw the first one's claim of the same name, who is dead now"
