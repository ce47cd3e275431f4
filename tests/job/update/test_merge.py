"""merge over two parts made by hand: which rows stand where afterwards, and what stays as it was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bulkrun.data.inputs.batch import InputBatch, Position
from bulkrun.data.inputs.subset import PICK_SCHEMA, write_subset
from bulkrun.data.results import parts
from bulkrun.data.results.parts import PartInfo, read_part_info, write_part
from bulkrun.data.results.schema import output_schema
from bulkrun.errors import RunError
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import read_record
from bulkrun.job.store.run_totals import RunTotals, publish_totals
from bulkrun.job.update import merge as merge_module
from bulkrun.job.update import replace_rows
from bulkrun.job.update.cause import Retry
from bulkrun.job.update.merge import merge
from bulkrun.job.update.staging import Update, close_staging, open_staging, staged_record
from bulkrun.job.update.update_claim import hold
from bulkrun.job.work.finish import sum_parts
from tests.job.small_runs import enter, job

SCHEMA = output_schema(pa.schema([("doc", pa.string())]))
Outcome = tuple[int, str]  # a row and its answer; one that begins with ! is an error


class Pick(NamedTuple):
    """A staged row: which result row it answers, and with what."""

    row: int
    answer: str
    keep_success: bool = False


def table_of(outcomes: Sequence[Outcome]) -> pa.Table:
    rows = [
        {"doc": f"d{row}", "row": row, "sample": 0, "finish_reason": "error" if text.startswith("!") else "stop"}
        | ({"error_code": text[1:]} if text.startswith("!") else {"response": text})
        | {"prompt_tokens": 1, "completion_tokens": 1}
        for row, text in outcomes
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def put_part(run: RunDir, number: int, outcomes: Sequence[Outcome]) -> PartInfo:
    record, rows = read_record(run), len(outcomes)
    errors = {"timeout": n} if (n := sum(text == "!timeout" for _, text in outcomes)) else {}
    info = PartInfo(record.run_id, record.plan_hash, number, "first", rows, rows, errors, rows, rows, {})
    write_part(run.part(number), table_of(outcomes), info)
    return info


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Rows 0 to 5 in two parts; 1 and 4 failed, and two ids repeat."""
    run, record = enter(tmp_path / "out", job(tmp_path / "out"))
    infos = [
        put_part(run, 0, [(0, "a"), (1, "!timeout"), (2, "c")]),
        put_part(run, 1, [(3, "d"), (4, "!timeout"), (5, "f")]),
    ]
    publish_totals(run, replace(sum_parts(record, infos), duplicate_ids=2))
    return run


def merged(run: RunDir, picks: Sequence[Pick], *, dropped: Sequence[int] = ()) -> RunTotals:
    """Merge a staged run that has answered these picks, all in one part."""
    with hold(run):
        staged = open_staging(run, staged_record(run, read_record(run), read_record(run).job))
        if picks:
            put_part(staged, 0, [(position, pick.answer) for position, pick in enumerate(picks)])
        rows = pa.RecordBatch.from_pydict(
            {"doc": [f"d{pick.row}" for pick in picks]}, pa.schema([("doc", pa.string())])
        )
        columns = [
            range(len(picks)),
            [pick.row for pick in picks],
            [None] * len(picks),
            [p.keep_success for p in picks],
        ]
        chosen = pa.RecordBatch.from_arrays(
            [pa.array(values, field.type) for values, field in zip(columns, PICK_SCHEMA, strict=True)],
            schema=PICK_SCHEMA,
        )
        batch = InputBatch(Position(0, 0), rows, {}, None)
        next_row = max([5, *(pick.row for pick in picks)]) + 1
        update = Update(Retry(), 1, len(picks), 6, next_row, 2, dropped=list(dropped))
        close_staging(
            run, update, lambda path: write_subset(path, rows.schema, [batch], [chosen], len(picks)), lambda: None
        )
        return merge(run)


def results(run: RunDir) -> dict[int, list[Outcome]]:
    """Part -> its rows and answers."""
    return {
        number: [
            (row["row"], row["response"] or f"!{row['error_code']}")
            for row in pq.read_table(path, partitioning=None).to_pylist()
        ]
        for number, path in sorted(run.parts().items())
    }


def test_rows_are_replaced_where_they_stand_and_new_ones_become_a_part(run: RunDir) -> None:
    totals = merged(run, [Pick(4, "e"), Pick(0, "A"), Pick(6, "g")])
    assert results(run) == {
        0: [(0, "A"), (1, "!timeout"), (2, "c")],
        1: [(3, "d"), (4, "e"), (5, "f")],
        2: [(6, "g")],
    }
    assert (totals.rows, totals.ok, totals.errors, totals.next_row) == (7, 6, {"timeout": 1}, 7)
    assert not run.staged.root.exists()


def test_a_part_without_a_row_that_changes_is_not_written_again(run: RunDir) -> None:
    before = run.part(1).stat()
    merged(run, [Pick(1, "b")])
    after = run.part(1).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert [read_part_info(run.part(shard)).generation for shard in (0, 1)] == [1, 0]


@pytest.mark.parametrize(
    ("keep_success", "row", "answer", "found"),
    [
        (True, 0, "!timeout", "a"),
        (True, 0, "A", "A"),
        (True, 1, "!bad_input", "!bad_input"),
        (False, 0, "!timeout", "!timeout"),
    ],
    ids=["error over success", "success over success", "error over error", "changed row"],
)
def test_an_error_replaces_a_success_only_where_that_is_not_to_be_kept(
    run: RunDir, keep_success: bool, row: int, answer: str, found: str
) -> None:
    merged(run, [Pick(row, answer, keep_success)])
    assert dict(results(run)[0])[row] == found


def test_dropped_rows_go_and_no_others(run: RunDir) -> None:
    totals = merged(run, [Pick(4, "e")], dropped=[0, 5])
    assert results(run) == {0: [(1, "!timeout"), (2, "c")], 1: [(3, "d"), (4, "e")]}
    assert totals.rows == 4 and totals.next_row == 6, "a number is given out once"


def test_the_dropped_rows_are_gone_through_once_for_all_parts(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A night that drops millions of rows of hundreds of parts would be at it for hours."""
    gone_through, real = list[int](), merge_module.read_update

    class Counted(list[int]):
        def __iter__(self) -> Iterator[int]:
            gone_through.append(len(self))
            return super().__iter__()

    def read_update(run: RunDir) -> Update | None:
        update = real(run)
        return update and replace(update, dropped=Counted(update.dropped))

    monkeypatch.setattr(merge_module, "read_update", read_update)
    merged(run, [Pick(1, "b"), Pick(4, "e")], dropped=[5, 0])
    assert results(run) == {0: [(1, "b"), (2, "c")], 1: [(3, "d"), (4, "e")]}
    assert len(gone_through) <= 1


def test_what_only_the_old_totals_know_is_carried_over(run: RunDir) -> None:
    assert merged(run, [Pick(1, "b")]).duplicate_ids == 2


def test_a_replaced_row_that_no_part_holds_is_an_error_before_anything_changes(run: RunDir) -> None:
    success = run.success.read_bytes()
    run.part(1).unlink()
    with pytest.raises(RunError, match="row 4, which is to be replaced, is in no part"):
        merged(run, [Pick(0, "A"), Pick(4, "e")])
    assert results(run) == {0: [(0, "a"), (1, "!timeout"), (2, "c")]} and run.success.read_bytes() == success


def test_a_part_is_gone_through_row_group_by_row_group(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a part may have millions of rows; of each group the answers that fit it, by row and sample, in any order."""
    monkeypatch.setattr(parts, "_ROW_GROUP_ROWS", 2)
    rows = [(row, f"old {row}") for row in range(6)]
    for number, its_rows in ((0, rows[:5]), (1, rows[5:])):
        run.part(number).unlink()
        put_part(run, number, its_rows)
    run.success.unlink()
    publish_totals(run, sum_parts(read_record(run), [read_part_info(run.part(number)) for number in (0, 1)]))
    seen, real = list[int](), merge_module.read_part_columns

    def read(path: Path, columns: list[str] | None = None) -> Iterator[pa.Table]:
        for table in real(path, columns):
            seen.append(table.num_rows)
            yield table

    monkeypatch.setattr(merge_module, "read_part_columns", read)
    merged(run, [Pick(3, "D"), Pick(0, "A")], dropped=[4])
    assert results(run)[0] == [(0, "A"), (1, "old 1"), (2, "old 2"), (3, "D")]
    assert max(seen) == 2
    assert (info := read_part_info(run.part(0))).rows == 4 and info.completion_tokens == 4
    assert pq.ParquetFile(run.part(0)).num_row_groups == 2, "a group that lost all of its rows is not there"


def test_rows_of_large_parts_are_taken_by_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    old, fresh = (pa.table({"response": [letter * 100 for letter in letters]}) for letters in ("abcd", "X"))
    both, places = pa.concat_tables([old, fresh]), np.array([0, 1, 4, 3])
    copied = replace_rows._taken(both, places)
    monkeypatch.setattr(replace_rows, "_COPIED_BYTES", 0)
    referred = replace_rows._taken(both, places)
    assert referred.to_pydict() == copied.to_pydict() == {"response": [letter * 100 for letter in "abXd"]}
    assert texts(referred) <= texts(both), "not a byte was copied"
    assert not texts(copied) & texts(both)


def texts(table: pa.Table) -> set[int]:
    """Where in memory the texts of a column lie."""
    return {chunk.buffers()[2].address for chunk in table["response"].chunks}
