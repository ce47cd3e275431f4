"""What an idle worker may take of another's shard: from the end, nothing that is done or in an engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bulkrun.job.store.heartbeat import Heartbeat
from bulkrun.job.store.journal import JournalRecord, JournalWriter
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.workers import LifeWatch, Worker
from bulkrun.job.work.flight import FlightLog, record_death
from bulkrun.job.work.shard_work import Generation, ShardWork, open_shard
from bulkrun.job.work.tail import Tail
from tests.job.small_runs import Row, enter, job, make_rows, write_plan

ROWS = make_rows(20, error_every=0, duplicate_every=0)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run, _ = enter(tmp_path / "out", job(tmp_path / "out"))
    write_plan(run, ROWS, 10)
    return run


@pytest.fixture
def owner(run: RunDir) -> Iterator[JournalWriter]:
    """The journal of a living worker that has shard 0 open."""
    heartbeat = Heartbeat(run, Worker.this_process("owner"), dict)
    heartbeat.start()
    yield JournalWriter(run.journal_file(0, "owner"))
    heartbeat.stop("completed")


def every(shard: int) -> bool:
    return True


def tail_of(run: RunDir, worker: str = "me") -> Tail:
    spec = job(run.root)

    def read(shard: int) -> ShardWork:
        return open_shard(run, shard, spec.sampling)

    return Tail(run, worker, LifeWatch(run), read)


def order_of(run: RunDir) -> list[Generation]:
    return list(open_shard(run, 0, job(run.root).sampling).generations)


def rows(generations: list[Generation]) -> list[int]:
    return [generation.rows[0] for generation in generations]


def done(*row: int) -> list[JournalRecord]:
    return [JournalRecord((one,), 0, "text", "stop") for one in row]


def test_a_shard_that_nobody_has_begun_is_left_to_be_claimed(run: RunDir) -> None:
    assert tail_of(run).look([0, 1], [], 5, every) is None


def test_help_comes_from_the_end_and_leaves_what_is_in_engines_or_done(run: RunDir, owner: JournalWriter) -> None:
    order = order_of(run)
    FlightLog(run, "owner").admit(order[:4], order[:4])
    owner.append(done(order[-1].rows[0]))
    found = tail_of(run).look([0, 1], {(0, order[-2].rows[0], 0)}, 3, every)
    assert found is not None and not found.whole
    assert rows(found.generations) == rows(order[-5:-2])
    everything = tail_of(run).look([0], [], 100, every)
    assert everything is not None and rows(everything.generations) == rows(order[4:-1])
    assert tail_of(run, "owner").elsewhere(0) == set(), "the owner's own engine is not elsewhere"


def test_help_is_as_much_as_there_is_room_for(tmp_path: Path) -> None:
    """A row of several texts takes a place for each."""
    run, _ = enter(tmp_path / "lines", job(tmp_path / "lines"))
    write_plan(run, [Row(n, f"{n}", (n, 2, 3, 4), {"parts": [1] * (n % 3 + 2)}) for n in range(6)], 6)
    JournalWriter(run.journal_file(0, "me"))
    last = [(row, row % 3 + 2) for row in rows(order_of(run))]
    assert last == [(5, 4), (4, 3), (3, 2), (2, 4), (1, 3), (0, 2)]
    for places, count in {1: 1, 2: 1, 3: 2, 5: 2, 6: 3, 9: 3, 10: 4, 99: 6}.items():
        found = tail_of(run).look([0], [], places, every)
        assert found is not None and rows(found.generations) == [row for row, _ in last[-count:]]


def test_whoever_sees_every_outcome_on_disk_knows_it_is_whole(run: RunDir, owner: JournalWriter) -> None:
    JournalWriter(run.journal_file(0, "me")).append(done(*rows(order_of(run)[:5])))
    owner.append(done(*rows(order_of(run))))
    found = tail_of(run).look([0, 1], [], 5, every)
    assert found is not None and found.whole and found.shard == 0


def test_a_shard_committed_meanwhile_needs_no_help(run: RunDir, owner: JournalWriter) -> None:
    run.part(0).touch()
    assert tail_of(run).look([0], [], 5, every) is None


def test_each_look_is_at_another_shard(run: RunDir, owner: JournalWriter) -> None:
    JournalWriter(run.journal_file(1, "owner"))
    tail = tail_of(run)
    found = [tail.look([0, 1], [], 5, every) for _ in range(4)]
    assert [help and help.shard for help in found] == [1, 0, 1, 0]


def test_rows_that_cannot_run_are_left_to_the_owner_until_it_dies(tmp_path: Path) -> None:
    """It journals them as it opens the shard; if it could not, nobody else would."""
    run, _ = enter(tmp_path / "out", job(tmp_path / "out"))
    write_plan(run, make_rows(10, error_every=4, duplicate_every=0), 10)
    heartbeat = Heartbeat(run, Worker.this_process("owner"), dict)
    heartbeat.start()
    for worker in ("owner", "me"):
        JournalWriter(run.journal_file(0, worker))
    found = tail_of(run).look([0], [], 5, every)
    assert found is not None and found.refused == []
    heartbeat.stop("failed")
    found = tail_of(run).look([0], [], 5, every)
    assert found is not None and sorted(record.rows for record in found.refused) == [(3,), (7,)]


def test_one_of_those_who_help_sees_to_what_a_dead_worker_had_in_its_engine(run: RunDir, owner: JournalWriter) -> None:
    for worker in ("dead", "me"):
        JournalWriter(run.journal_file(0, worker))
    heartbeat = Heartbeat(run, Worker.this_process("me"), dict)
    heartbeat.start()
    order = order_of(run)
    FlightLog(run, "dead").admit(order[:2], order[:2])
    record_death(run, "dead", "signal SIGSEGV")
    for worker, sees in (("me", True), ("owner", False)):
        found = tail_of(run, worker).look([0], [], 100, every)
        assert found is not None and rows(found.generations) == rows(order[2:])
        assert (found.aside is not None) == sees
    heartbeat.stop("completed")
