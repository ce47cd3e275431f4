"""Commit and finish: exclusive, repeatable, and nothing is marked done that is not whole."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bulkrun.data.results.parts import PartInfo, read_part_info
from bulkrun.data.results.schema import output_schema
from bulkrun.data.storage.durable import replace_json
from bulkrun.errors import RunError
from bulkrun.job.plan.shard_file import ShardInfo, read_shard
from bulkrun.job.store.journal import JournalRecord, JournalWriter
from bulkrun.job.store.replaced import OwnRun
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import RunRecord
from bulkrun.job.store.run_totals import read_totals
from bulkrun.job.work.commit import RunIdentity, build_table, commit_answered, commit_shard
from bulkrun.job.work.finish import finish_run
from bulkrun.scratch import Scratch
from tests.job.small_runs import PASSTHROUGH, Row, enter, job, results, write_plan
from tests.test_scratch import dead

ROWS = [Row(row, f"id-{row}", (row,)) for row in range(5)]


def opened(path: Path, n: int = 1, shard_rows: int = 5) -> tuple[RunDir, RunRecord, RunIdentity]:
    run, record = enter(path, job(path, n=n))
    write_plan(run, ROWS, shard_rows, samples=n)
    return run, record, RunIdentity(record.run_id, record.plan_hash, n, record.versions)


def journal_rows(run: RunDir, shard: int, attempt: str, rows: list[int], samples: int = 1, text: str = "t") -> None:
    writer = JournalWriter(run.journal_file(shard, attempt))
    for row in rows:
        failed = row == 3
        answer = (None, "error", 0, 0, "bad_input", "why") if failed else (f"{text}{row}", "stop", 2, 3)
        writer.append([JournalRecord((row,), sample, *answer) for sample in reversed(range(samples))])
    writer.release()


def test_a_part_is_in_input_order_with_the_declared_schema_and_a_footer_that_counts(tmp_path: Path) -> None:
    run, record, identity = opened(tmp_path, n=2)
    journal_rows(run, 0, "a", [4, 0, 3], samples=2)
    journal_rows(run, 0, "b", [1, 2, 0], samples=2)
    replace_json(run.claims / f"{run.shard_claim(0)}.1", {})
    info = commit(run, 0, identity)
    table = pq.read_table(run.part(0))
    assert table.schema.remove_metadata() == output_schema(PASSTHROUGH)
    assert list(zip(table["row"].to_pylist(), table["sample"].to_pylist(), strict=True)) == [
        (row, sample) for row in range(5) for sample in range(2)
    ]
    assert table["doc"].to_pylist()[::2] == [f"text {row}" for row in range(5)]
    assert (info.rows, info.input_rows, info.errors) == (10, 5, {"bad_input": 2})
    assert (info.prompt_tokens, info.completion_tokens) == (16, 24)
    assert (info.run_id, info.plan_hash) == (record.run_id, record.plan_hash) and read_part_info(run.part(0)) == info
    assert list(run.journal.iterdir()) == list(run.claims.iterdir()) == list(run.tmp.iterdir()) == []


def test_of_two_workers_on_one_shard_exactly_one_publishes_and_both_go_on(tmp_path: Path) -> None:
    run, _, identity = opened(tmp_path)
    journal_rows(run, 0, "a", list(range(5)), text="a")
    journal_rows(run, 0, "b", list(range(5)), text="b")
    infos: list[PartInfo] = []
    threads = [threading.Thread(target=lambda: infos.append(commit(run, 0, identity))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(infos) == 6 and len({info.attempt for info in infos}) == 1
    assert [row["response"] for row in results(tmp_path)] == ["a0", "a1", "a2", None, "a4"]


def test_a_late_commit_after_the_journals_are_gone_finds_the_part(tmp_path: Path) -> None:
    run, _, identity = opened(tmp_path)
    journal_rows(run, 0, "a", list(range(5)))
    first = commit(run, 0, identity)
    journal_rows(run, 0, "zombie", [1], text="other")
    assert commit(run, 0, identity) == first
    assert list(run.journal.iterdir()) == [], "a zombie's journal goes too"


def test_a_shard_that_another_worker_commits_while_this_one_reads_it_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _, identity = opened(tmp_path)
    journal_rows(run, 0, "a", list(range(5)))
    theirs = list[PartInfo]()

    def late(path: Path) -> tuple[ShardInfo, pa.Table]:
        monkeypatch.undo()
        theirs.append(commit(run, 0, identity))
        return read_shard(path)

    monkeypatch.setattr("bulkrun.job.work.commit.read_shard", late)
    assert [commit(run, 0, identity)] == theirs


def test_no_part_appears_in_a_run_that_was_replaced_while_it_was_written(tmp_path: Path) -> None:
    run, _, identity = opened(tmp_path)
    journal_rows(run, 0, "a", list(range(5)))

    def replaced() -> None:
        raise RunError("moved aside")

    with pytest.raises(RunError, match="moved aside"):
        commit_shard(run, 0, identity, replaced)
    assert not run.part(0).exists() and run.journals_of(0)


def test_a_shard_with_a_missing_outcome_is_not_committed(tmp_path: Path) -> None:
    run, _, identity = opened(tmp_path)
    journal_rows(run, 0, "a", [0, 1, 2, 4])
    with pytest.raises(RunError, match="1 of 5 outcomes of shard 0 do not read back"):
        commit(run, 0, identity)
    assert not run.part(0).exists()


def test_of_a_plan_that_is_given_up_rows_with_all_their_samples_are_kept(tmp_path: Path) -> None:
    run, _, identity = opened(tmp_path, n=2)
    journal_rows(run, 0, "a", [1, 4], samples=2)
    journal_rows(run, 0, "b", [2])
    commit_answered(run, 0, identity, run.journals_of(0), OwnRun(run, identity.run_id).check)
    assert [(row["row"], row["sample"]) for row in results(tmp_path)] == [(1, 0), (1, 1), (4, 0), (4, 1)]
    assert read_part_info(run.part(0)).input_rows == 2 and not run.journals_of(0)


def test_a_disk_that_is_full_when_a_part_is_written_is_told_and_the_journals_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "full")

    run, _, identity = opened(tmp_path)
    journal_rows(run, 0, "a", list(range(5)))
    with monkeypatch.context() as patch, pytest.raises(RunError, match=r"No space left.*free some space"):
        patch.setattr("bulkrun.job.work.commit.write_part", full)
        commit(run, 0, identity)
    assert commit(run, 0, identity).rows == 5


def test_a_part_of_another_run_is_refused(tmp_path: Path) -> None:
    other, _, foreign = opened(tmp_path / "other")
    journal_rows(other, 0, "a", list(range(5)))
    commit(other, 0, foreign)
    run, _, identity = opened(tmp_path / "out")
    run.part(0).write_bytes(other.part(0).read_bytes())
    with pytest.raises(RunError, match="belongs to another run"):
        commit(run, 0, identity)


def commit(run: RunDir, shard: int, identity: RunIdentity) -> PartInfo:
    return commit_shard(run, shard, identity, OwnRun(run, identity.run_id).check)


def commit_all(run: RunDir, identity: RunIdentity) -> None:
    for shard in (0, 1):
        journal_rows(run, shard, "a", list(range(shard * 3, min(5, shard * 3 + 3))))
        commit(run, shard, identity)


def test_finish_writes_totals_once(tmp_path: Path) -> None:
    run, record, identity = opened(tmp_path, shard_rows=3)
    commit_all(run, identity)
    totals = finish_run(run, record)
    assert (totals.status, totals.rows, totals.ok, totals.errors) == ("completed_with_errors", 5, 4, {"bad_input": 1})
    assert (totals.parts, totals.exit_code, totals.fingerprints) == (2, 3, record.fingerprints)
    assert finish_run(run, record) == totals == read_totals(run)


def test_finish_removes_the_folder_of_a_query_that_was_killed(tmp_path: Path) -> None:
    run, record, identity = opened(tmp_path, shard_rows=3)
    commit_all(run, identity)
    run.tmp.mkdir(exist_ok=True)
    with Scratch(run.tmp) as living:
        dead(run.tmp)
        finish_run(run, record)
        assert [path for path in run.tmp.iterdir() if path.is_dir()] == [living]


def test_finish_removes_the_flights_of_the_dead(tmp_path: Path) -> None:
    run, record, identity = opened(tmp_path, shard_rows=3)
    commit_all(run, identity)
    run.flight.mkdir()
    run.flight_file("dead").write_text('{"in":[[0,0,0]]}\n')
    finish_run(run, record)
    assert run.workers_in_flight() == []


def test_finish_says_which_part_is_missing(tmp_path: Path) -> None:
    run, record, identity = opened(tmp_path, shard_rows=3)
    commit_all(run, identity)
    run.part(1).unlink()
    with pytest.raises(RunError, match=r"parts missing: \[1\], too many: \[\]"):
        finish_run(run, record)
    assert not run.success.exists()


def test_finish_refuses_totals_that_do_not_add_up(tmp_path: Path) -> None:
    run, record, identity = opened(tmp_path, shard_rows=3)
    commit_all(run, identity)
    replace_json(run.plan_complete, {"rows": 6, "shards": 2})
    with pytest.raises(RunError, match="the input has 6 rows, the parts answer 5"):
        finish_run(run, record)


def test_finish_says_which_part_is_too_much(tmp_path: Path) -> None:
    run, record, identity = opened(tmp_path, shard_rows=3)
    commit_all(run, identity)
    run.part(2).write_bytes(run.part(1).read_bytes())
    with pytest.raises(RunError, match=r"parts missing: \[\], too many: \[2\]"):
        finish_run(run, record)


def test_finish_refuses_parts_of_another_run_or_with_another_number_of_samples(tmp_path: Path) -> None:
    run, record, identity = opened(tmp_path, shard_rows=3)
    commit_all(run, identity)
    with pytest.raises(RunError, match=r"part-00000\.parquet: belongs to another run"):
        finish_run(run, replace(record, run_id="0" * 16))
    with pytest.raises(RunError, match=r"part-00000\.parquet: 3 output rows for 3 rows x 2 samples"):
        finish_run(run, replace(record, job=job(tmp_path, n=2).model_dump()))
    assert not run.success.exists()


def test_rivals_finish_with_one_success_file(tmp_path: Path) -> None:
    run, record, identity = opened(tmp_path, shard_rows=3)
    commit_all(run, identity)
    finished: list[str] = []
    threads = [threading.Thread(target=lambda: finished.append(finish_run(run, record).finished)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(finished) == 6 and len(set(finished)) == 1


def test_large_values_are_repeated_for_the_samples_without_being_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = []
    for name, limit in (("copied", 2**20), ("referred", 0)):
        monkeypatch.setattr("bulkrun.job.work.commit._COPIED_BYTES", limit)
        run, _, identity = opened(tmp_path / name, n=3)
        journal_rows(run, 0, "a", list(range(5)), samples=3)
        commit(run, 0, identity)
        tables.append(pq.read_table(run.part(0)))
    assert tables[0].equals(tables[1])
    assert tables[0]["doc"].to_pylist() == [f"text {row}" for row in range(5) for _ in range(3)]


def test_samples_of_more_text_than_one_array_holds_make_a_table() -> None:
    nested = pa.StructArray.from_arrays([pa.array(["x" * 2**20] * 50)], fields=[pa.field("doc", pa.string())])
    rows = pa.table({"row": range(50), "passthrough": nested})
    outcomes = [(row, sample, JournalRecord((row,), sample)) for row in range(50) for sample in range(60)]
    assert build_table(rows, outcomes, samples=60)["doc"].nbytes > 2**31
