"""What the flights of the dead say (`flight`, `suspicion`): who is suspect, convicted, or was never to blame."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulkrun.errors import RunError
from bulkrun.job.store.heartbeat import Heartbeat
from bulkrun.job.store.journal import JournalRecord, JournalWriter
from bulkrun.job.store.open_journals import OpenJournals
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.workers import LifeWatch, Worker
from bulkrun.job.work import flight as flight_module
from bulkrun.job.work import suspicion as suspicion_module
from bulkrun.job.work.flight import FlightLog, key_of, read_flight, record_death
from bulkrun.job.work.shard_work import Generation, ShardWork
from bulkrun.job.work.suspicion import Suspicion, set_aside, suspicion
from bulkrun.request import Request
from tests.job.small_runs import job, make_rows, start


def generation(row: int, shard: int = 0) -> Generation:
    return Generation(Request(f"{row}:0", (1, 2)), shard, (row, row + 1000), 0)


def generations(*rows: int) -> list[Generation]:
    return [generation(row) for row in rows]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    for folder in (run.journal, run.workers, run.flight):
        folder.mkdir(parents=True)
    return run


def flight_log(run: RunDir, worker: str, unjournaled: Callable[[], Iterable[Generation]] = tuple) -> FlightLog:
    """The log of a worker that has shard 0 open."""
    JournalWriter(run.journal_file(0, worker))
    return FlightLog(run, worker, unjournaled)


def dies(run: RunDir, worker: str, rows: Sequence[int], how: str | None = "signal SIGSEGV") -> None:
    """A worker admits rows at once and dies; `how` None: nobody sees it."""
    flight_log(run, worker).admit(generations(*rows), generations(*rows))
    if how:
        record_death(run, worker, how)


def judge(run: RunDir, shard: int = 0) -> Suspicion:
    return suspicion(run, shard, LifeWatch(run))


def test_suspects_are_what_was_admitted_and_not_journaled(run: RunDir) -> None:
    log = flight_log(run, "w")
    log.admit(generations(1, 2, 3), generations(1, 2, 3))
    log.admit(generations(4), generations(2, 3, 4))
    JournalWriter(run.journal_file(0, "other")).append([JournalRecord((1, 1001), 0, "text", "stop")])
    flight = record_death(run, "w", "signal SIGKILL")
    assert (flight.left, flight.finished) == ([(0, 2, 0), (0, 3, 0), (0, 4, 0)], False)
    assert judge(run).group_of == {(0, 2, 0): 3, (0, 3, 0): 3, (0, 4, 0): 3}
    assert judge(run).convicted == {} and judge(run, shard=1).group_of == {}


def test_an_engine_that_was_empty_clears_those_before(run: RunDir) -> None:
    log = flight_log(run, "w")
    log.admit(generations(1, 2), generations(1, 2))
    log.finished()
    log.admit(generations(3), generations(3))
    flight = read_flight(run.flight / "w.jsonl")
    assert flight.left == [(0, 3, 0)] and flight.finished


def test_a_file_that_is_begun_anew_because_it_is_long_names_all_that_is_in_the_engine(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_module, "_LONGEST_BYTES", 0)
    log = flight_log(run, "w")
    log.admit(generations(1, 2), generations(1, 2))
    log.admit(generations(3), generations(2, 3))
    assert read_flight(run.flight / "w.jsonl").left == [(0, 2, 0), (0, 3, 0)]


def test_what_was_committed_since_is_not_suspect(run: RunDir) -> None:
    run.part(0).touch()  # and its journals went with that
    log = flight_log(run, "w")
    log.admit([*generations(1), generation(1, shard=7)], [*generations(1), generation(1, shard=7)])
    assert record_death(run, "w", "signal SIGSEGV").left == [(7, 1, 0)]


def test_what_left_the_engine_is_suspect_until_it_is_journaled(run: RunDir) -> None:
    """An answer can kill the process that reads it: whoever runs alone by then must not be taken for the culprit."""
    log = flight_log(run, "w", lambda: generations(1))
    log.admit(generations(1, 2), generations(1, 2))
    log.admit(generations(3), generations(3))
    JournalWriter(run.journal_file(0, "other")).append([JournalRecord((2, 1002), 0, "text", "stop")])
    assert record_death(run, "w", "exit status 1").left == [(0, 1, 0), (0, 3, 0)]
    assert judge(run).group_of == {(0, 1, 0): 2, (0, 3, 0): 2}


def test_an_orderly_end_leaves_nothing(run: RunDir) -> None:
    log = flight_log(run, "w")
    log.close()
    log.admit(generations(1), generations(1))
    log.close()
    assert not list(run.flight.iterdir())
    assert record_death(run, "w", "signal SIGSEGV").left == []
    assert not list(run.flight.iterdir())


def test_two_witnessed_deaths_alone_convict_and_one_does_not(run: RunDir) -> None:
    dies(run, "a", [1, 2, 3])
    dies(run, "b", [2])
    assert judge(run).convicted == {} and judge(run).group_of[0, 2, 0] == 1
    dies(run, "c", [2], "exit status 137")
    assert judge(run).convicted == {(0, 2, 0): "exit status 137"}
    dies(run, "d", [2], how=None)
    assert judge(run).convicted == {(0, 2, 0): "exit status 137"}, "how it died then is not known"


def test_the_last_one_left_of_a_group_is_not_alone(run: RunDir) -> None:
    """Others that were there when it died finished since: that death was not its own."""
    dies(run, "a", [1, 2])
    dies(run, "b", [1, 2])
    JournalWriter(run.journal_file(0, "c")).append([JournalRecord((1, 1001), 0, "text", "stop")])
    dies(run, "d", [2])
    assert judge(run).convicted == {}


def test_a_power_cut_or_a_kill_of_everything_convicts_nobody(run: RunDir) -> None:
    dies(run, "a", [1], how=None)
    assert judge(run) == Suspicion(), "once is a power cut"
    for name in "bcde":
        dies(run, name, [1], how=None)
    assert judge(run) == Suspicion({(0, 1, 0): 1}), "again and again is suspect, and runs alone"


def test_a_power_cut_says_nothing_of_what_was_suspect_before(run: RunDir) -> None:
    dies(run, "a", [1, 2, 3])
    dies(run, "b", [1], how=None)
    assert judge(run).group_of[0, 1, 0] == 3


def test_the_living_are_not_asked(run: RunDir) -> None:
    worker = Worker.this_process("alive")
    heartbeat = Heartbeat(run, worker, dict)
    heartbeat.start()
    for name in ("alive", "dead"):
        flight_log(run, name).admit(generations(1), generations(1))
    assert judge(run) == Suspicion()
    heartbeat.stop("failed")
    assert judge(run).group_of == {(0, 1, 0): 1}


def test_the_flights_of_the_living_are_not_even_read(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeat = Heartbeat(run, Worker.this_process("alive"), dict)
    heartbeat.start()
    for name in ("alive", "dead"):
        flight_log(run, name).admit(generations(1), generations(1))
    read = list[str]()
    monkeypatch.setattr(suspicion_module, "read_flight", lambda path: read.append(path.stem) or read_flight(path))
    assert judge(run) == Suspicion() and read == ["dead"]
    heartbeat.stop("completed")


def test_only_flights_of_those_who_had_the_shard_open_are_read(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each shard that is opened costs as much as all who ever died."""
    dies(run, "here", [1], how=None)
    for name in ("there", "elsewhere"):
        FlightLog(run, name).admit([generation(1, shard=7)], [generation(1, shard=7)])
        JournalWriter(run.journal_file(7, name))
    read = list[str]()
    monkeypatch.setattr(suspicion_module, "read_flight", lambda path: read.append(path.stem) or read_flight(path))
    assert judge(run) == Suspicion() and read == ["here"]
    assert judge(run, shard=7).group_of == {(7, 1, 0): 1} and read == ["here", "elsewhere", "there"]


def test_a_torn_line_is_left_out(run: RunDir) -> None:
    dies(run, "a", [1, 2], how=None)
    path = run.flight / "a.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"in": [[0, 3')
    assert read_flight(path).left == [(0, 1, 0), (0, 2, 0)]


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 40), unique=True),
    st.dictionaries(st.integers(0, 40), st.integers(1, 30)),
    st.sets(st.integers(0, 40)),
)
def test_setting_aside_keeps_every_generation_exactly_once(
    rows: list[int], suspects: dict[int, int], guilty: set[int]
) -> None:
    work = ShardWork(0, len(rows), [], iter(generations(*rows)), {})
    found = Suspicion(
        {(0, row, 0): size for row, size in suspects.items()}, {(0, row, 0): "x" for row in guilty & suspects.keys()}
    )
    aside = set_aside(work, found)
    kept = [generation.rows[0] for generation in aside.work.generations]
    grouped = [generation.rows[0] for group in aside.groups for generation in group]
    convicted = [generation.rows[0] for generation, _ in aside.convicted]
    assert kept == [row for row in rows if row not in suspects]
    assert sorted(kept + grouped + convicted) == sorted(rows)
    assert set(convicted) == set(rows) & guilty & suspects.keys()
    for group in aside.groups:
        sizes = {found.group_of[key_of(generation)] for generation in group}
        assert len(sizes) == 1 and len(group) <= -(-sizes.pop() // 8)
    sizes_in_order = [found.group_of[key_of(group[0])] for group in aside.groups]
    assert sizes_in_order == sorted(sizes_in_order, reverse=True), "the least suspect run first"


def test_a_full_disk_is_no_crash_and_makes_no_row_suspect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: OpenJournals, shard: int, records: object) -> None:
        raise RunError("No space left on device")

    monkeypatch.setattr(OpenJournals, "append", full)
    with pytest.raises(RunError, match="No space"):
        start(tmp_path / "out", make_rows(20), job(tmp_path / "out"))
    assert not RunDir(tmp_path / "out").workers_in_flight()
