"""From completions to records on disk, on a thread whose failure nobody misses."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bulkrun.data.storage.durable import replace_json
from bulkrun.errors import RunError
from bulkrun.job.store.journal import JournalRecord, PartialRecord, read_journal, read_outcomes
from bulkrun.job.store.open_journals import OpenJournals
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.work.answers import Answer
from bulkrun.job.work.commit import RunIdentity
from bulkrun.job.work.recorder import Recorded, Recorder
from bulkrun.job.work.shard_work import Generation, open_shard
from bulkrun.request import Completion, Request, RowError, SamplingParams, StructuredOutput
from tests.job.small_runs import Row, enter, job, write_plan
from tests.waiting import wait_until


def generation(rows: tuple[int, ...] = (0,)) -> Generation:
    return Generation(Request(f"{rows[0]}:0", [1, 2, 3]), 0, rows, 0)


def digits(batch: list[Sequence[int]]) -> list[str]:
    return ["".join(map(str, ids)) for ids in batch]


def recorder(tmp_path: Path, decode: object, checkpoint_every: float = 60.0) -> tuple[RunDir, Recorder]:
    """The recorder of a run of two shards of three rows, which has the first of them open."""
    spec = job(tmp_path)
    run, record = enter(tmp_path, spec)
    write_plan(run, [Row(row, str(row), (row,)) for row in range(6)], 3)
    identity = RunIdentity(record.run_id, record.plan_hash, 1)
    made = Recorder(run, identity, decode, attempt="me", checkpoint_every=checkpoint_every)  # type: ignore[arg-type]
    made.start()
    made.open(open_shard(run, 0, spec.sampling))
    return run, made


def test_stop_strings_are_cut_and_finished_rows_are_readable_before_any_sync(tmp_path: Path) -> None:
    def decode(batch: list[Sequence[int]]) -> list[str]:
        return ["".join({1: "yes", 2: ".\n", 3: "no"}[token] for token in ids) for ids in batch]

    run, made = recorder(tmp_path, decode)
    made.record([Answer(generation((0, 2)), Completion("0:0", (1, 2), "stop", "\n"))])
    wait_until(lambda: read_journal(run.journal_file(0, "me")).records, "a record", 10)
    records = read_journal(run.journal_file(0, "me")).records
    assert [(record.rows, record.response) for record in records] == [((0, 2), "yes.")]
    assert made.take_committed() == []
    made.record([Answer(generation((1,)), Completion("1:0", (3,), "stop"))])
    made.close()
    assert [shard for shard, _ in made.take_committed()] == [0] and run.part(0).exists()


def test_a_checkpoint_makes_what_ended_durable_while_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, real = set[int](), os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.add(os.fstat(file).st_ino), real(file))[1])
    run, made = recorder(tmp_path, digits, checkpoint_every=0.01)
    made.record([Answer(generation(), Completion("0:0", (7,), "stop"))])
    wait_until(lambda: run.journal_file(0, "me").stat().st_ino in synced, "a checkpoint", 10)
    made.close()


def test_what_ended_just_before_a_worker_does_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, real = set[int](), os.fsync
    run, made = recorder(tmp_path, digits)
    monkeypatch.setattr(os, "fsync", lambda file: (synced.add(os.fstat(file).st_ino), real(file))[1])
    made.record([Answer(generation(), Completion("0:0", (7,), "stop"))])
    made.close()
    assert run.journal_file(0, "me").stat().st_ino in synced


def test_an_answer_is_on_its_way_until_a_journal_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should the process die before that, it is suspect."""
    seen, append = list[tuple[Generation, ...]](), OpenJournals.append

    def watched(self: OpenJournals, shard: int, records: Sequence[JournalRecord | PartialRecord]) -> None:
        seen.append(made.unjournaled())
        append(self, shard, records)

    _, made = recorder(tmp_path, digits)
    wait_until(lambda: made.idle, "the recorder", 10)
    monkeypatch.setattr(OpenJournals, "append", watched)
    made.record([Answer(generation(), Completion("0:0", (7,), "stop"))])
    made.close()
    assert seen == [(generation(),)] and made.unjournaled() == ()


def test_a_shard_is_not_begun_in_a_run_that_was_replaced(tmp_path: Path) -> None:
    run, made = recorder(tmp_path, digits)
    replace_json(run.run_json, {**json.loads(run.run_json.read_text()), "run_id": "0" * 16})
    with pytest.raises(RunError, match="moved aside"):
        made.open(open_shard(run, 1, job(tmp_path).sampling))
    made.close()


def test_what_kills_the_thread_comes_out_in_the_engines_thread(tmp_path: Path) -> None:
    def decode(batch: list[Sequence[int]]) -> list[str]:
        raise RunError("no such token")

    _, made = recorder(tmp_path, decode)
    made.record([Answer(generation(), Completion("0:0", (1,), "stop"))])
    deadline = time.monotonic() + 10
    with pytest.raises(RunError, match="no such token"):
        while time.monotonic() < deadline:
            made.check()
    with pytest.raises(RunError, match="no such token"):
        made.close()


def test_an_engine_that_waits_for_the_disk_hears_that_it_failed(tmp_path: Path) -> None:
    def decode(batch: list[Sequence[int]]) -> list[str]:
        wait_until(made._queue.full, "an engine that is far ahead", 30)
        raise RunError("disk full")

    _, made = recorder(tmp_path, decode)
    with pytest.raises(RunError, match="disk full"):
        while True:
            made.record([Answer(generation(), Completion("0:0", (1,), "stop"))])


def test_a_failure_is_late_only_if_the_engine_did_not_know_of_it(tmp_path: Path) -> None:
    """The progress counts an engine's error when it comes: one that is late is counted again."""
    _, made = recorder(tmp_path, digits)
    an_object = SamplingParams(structured_outputs=StructuredOutput("json", '{"type": "object"}'))
    other = Generation(Request("1:0", [1], an_object), 0, (1,), 0)
    made.record([Answer(generation((0,)), Completion("0:0", (), "error", error=RowError("nan_logits", "no")))])
    made.record([Answer(other, Completion("1:0", (7,), "stop"))])
    made.record([Answer(generation((2,)), Completion("2:0", (7,), "stop"))])
    made.close()
    assert made.take_recorded() == [
        Recorded(shard=0, rows=1, failed=True, late=False),
        Recorded(shard=0, rows=1, failed=True, late=True),
        Recorded(shard=0, rows=1, failed=False, late=False),
    ]


@pytest.mark.parametrize("shard", [0, 1])
def test_a_shard_that_others_work_on_is_committed_only_when_told_so(tmp_path: Path, shard: int) -> None:
    run, made = recorder(tmp_path, digits)
    mine, theirs = (3 * shard, 3 * shard + 1), 3 * shard + 2
    made.help(shard, [JournalRecord((mine[0],), 0, error_code="bad_input")])
    made.record([Answer(replace(generation((mine[1],)), shard=shard), Completion("", (7,), "stop"))])
    wait_until(lambda: made.idle, "the recorder", 10)
    assert sorted(read_outcomes(run.journals_of(shard)).answered) == [(row, 0) for row in mine]
    assert made.take_committed() == []
    made.record([Answer(replace(generation((theirs,)), shard=shard), Completion("", (8,), "stop"))])
    wait_until(lambda: made.idle, "the recorder", 10)
    assert made.take_committed() == [], "whose outcomes they are is not known here"
    made.commit(shard)
    made.close()
    assert [committed for committed, _ in made.take_committed()] == [shard] and run.part(shard).exists()


def test_more_shards_are_open_than_the_process_may_open_files(tmp_path: Path) -> None:
    spec = job(tmp_path)
    run, record = enter(tmp_path, spec)
    write_plan(run, [Row(row, str(row), (row,)) for row in range(100)], 1)
    with Path("/dev/null").open() as first_free:
        most = first_free.fileno() + 40
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, limit[1]))
    try:
        made = Recorder(run, RunIdentity(record.run_id, record.plan_hash, 1), digits, "me", checkpoint_every=0.01)
        made.start()
        for shard in range(100):
            made.open(open_shard(run, shard, spec.sampling))
        for shard in range(100):
            answer = Answer(replace(generation((shard,)), shard=shard), Completion("", (7,), "stop"))
            made.record([answer])
        made.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert len(made.take_committed()) == 100 and not run.journaled_shards()
