"""From completions to records on disk, on a thread whose failure nobody misses."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from bulkrun.errors import RunError
from bulkrun.job.store.journal import read_journal
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.work.answers import Answer
from bulkrun.job.work.commit import RunIdentity
from bulkrun.job.work.recorder import Recorder
from bulkrun.job.work.shard_work import Generation, open_shard
from bulkrun.request import Completion, Request
from tests.job.small_runs import Row, enter, job, write_plan


def generation(rows: tuple[int, ...] = (0,)) -> Generation:
    return Generation(Request(f"{rows[0]}:0", [1, 2, 3]), 0, rows, 0)


def recorder(tmp_path: Path, decode: object, checkpoint_every: float = 60.0) -> tuple[RunDir, Recorder]:
    spec = job(tmp_path)
    run, record = enter(tmp_path, spec)
    write_plan(run, [Row(row, str(row), (row,)) for row in range(3)], 3)
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
    deadline = time.monotonic() + 10
    while not (records := read_journal(run.journal_file(0, "me")).records):
        assert time.monotonic() < deadline
    assert [(record.rows, record.response) for record in records] == [((0, 2), "yes.")]
    assert made.take_committed() == []
    made.record([Answer(generation((1,)), Completion("1:0", (3,), "stop"))])
    made.close()
    assert [shard for shard, _ in made.take_committed()] == [0] and run.part(0).exists()


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
