from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bulkrun.data.inputs.batch import MAX_BATCH_BYTES, MAX_BATCH_ROWS, InputBatch, Position
from bulkrun.data.inputs.reader import open_input
from bulkrun.errors import InputError
from bulkrun.request import RowError
from tests.data.reading import read_all

SIZES = [1500, 0, 1, 1024, 2049]


def write_files(folder: Path, format_: str) -> list[int]:
    """Files of SIZES rows of one column `a`, which counts through all of them."""
    first = 0
    for number, size in enumerate(SIZES):
        values = list(range(first, first + size))
        path = folder / f"{number}.{format_}"
        if format_ == "parquet":
            pq.write_table(pa.table({"a": pa.array(values, pa.int64())}), path, row_group_size=300)
        elif format_ == "csv":
            path.write_text("a\n" + "".join(f"{value}\n" for value in values))
        else:
            path.write_text("".join(json.dumps({"a": value}) + "\n" for value in values))
        first += size
    return list(range(first))


@pytest.mark.parametrize("format_", ["parquet", "jsonl", "csv"])
def test_several_files_read_from_every_kind_of_position_to_the_end_or_a_limit(tmp_path: Path, format_: str) -> None:
    everything = write_files(tmp_path, format_)
    with open_input(str(tmp_path)) as dataset:
        for start in [
            (0, 0),
            (0, 1),
            (0, 1023),
            (0, 1024),
            (0, 1500),
            (1, 0),
            (2, 0),
            (2, 1),
            (3, 1000),
            (4, 2049),
            (5, 0),
        ]:
            skipped = sum(SIZES[: start[0]]) + start[1]
            for limit in (None, 1, 1024, 1025, 4000):
                rows, errors = read_all(dataset, Position(*start), limit=limit)
                want = everything[skipped:] if limit is None else everything[skipped : skipped + limit]
                assert [int(row["a"]) for row in rows] == want
                assert errors == {}


@pytest.mark.parametrize("format_", ["parquet", "jsonl", "csv"])
def test_going_on_from_the_next_of_any_batch_gives_the_same_tail(tmp_path: Path, format_: str) -> None:
    write_files(tmp_path, format_)
    with open_input(str(tmp_path)) as dataset:
        everything, _ = read_all(dataset)
        seen = 0
        for batch in dataset.batches():
            assert 0 < batch.rows.num_rows <= MAX_BATCH_ROWS
            seen += batch.rows.num_rows
            assert read_all(dataset, batch.next)[0] == everything[seen:]


@pytest.mark.parametrize("format_", ["parquet", "jsonl", "csv"])
def test_batches_of_big_rows_are_bounded_in_bytes(tmp_path: Path, format_: str) -> None:
    rows, size = 60, 2**20
    path = tmp_path / f"x.{format_}"
    if format_ == "parquet":
        pq.write_table(pa.table({"a": ["x" * size] * rows}), path, use_dictionary=False)
    elif format_ == "csv":
        path.write_text("a\n" + ("x" * size + "\n") * rows)
    else:
        path.write_text((json.dumps({"a": "x" * size}) + "\n") * rows)
    with open_input(str(path)) as dataset:
        sizes = [batch.rows.nbytes for batch in dataset.batches()]
    assert max(sizes) <= MAX_BATCH_BYTES + 2 * size
    assert sum(sizes) >= rows * size


@pytest.mark.parametrize(
    ("name", "data", "is_void"),
    [("x.csv", "", True), ("x.csv", "a\n", False), ("x.jsonl", "\n", True), ("x.jsonl", '{"a": 1}\n', False)],
)
def test_an_input_is_void_where_nothing_shows_its_columns_and_no_query_is_asked(
    tmp_path: Path, name: str, data: str, is_void: bool
) -> None:
    (tmp_path / name).write_text(data)
    for sql in (None, "SELECT a FROM input"):
        with open_input(str(tmp_path), sql=sql) as dataset:
            assert dataset.is_void == is_void


def test_a_slice_of_a_batch_has_its_own_errors_and_numbers() -> None:
    errors = {row: RowError("bad_input", f"row {row}") for row in (0, 2, 4)}
    batch = InputBatch(Position(1, 10), pa.record_batch({"a": range(5)}), errors, pa.array(range(50, 55)))
    part = batch.slice(1, 3)
    assert (part.position, part.next, part.rows.to_pydict()) == (Position(1, 11), Position(1, 14), {"a": [1, 2, 3]})
    assert part.errors == {1: errors[2]} and part.numbers is not None and part.numbers.to_pylist() == [51, 52, 53]
    assert batch.slice(4).errors == {0: errors[4]}


def test_a_mixture_of_formats_is_refused(tmp_path: Path) -> None:
    write_files(tmp_path, "csv")
    write_files(tmp_path, "jsonl")
    with pytest.raises(InputError, match=r"0\.csv is csv but .*0\.jsonl is jsonl"):
        open_input(str(tmp_path))


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("{}\n")
    with open_input(str(tmp_path)) as dataset:
        (tmp_path / "x.jsonl").unlink()
        with pytest.raises(InputError, match=r"x\.jsonl: cannot be read"):
            list(dataset.batches())


@pytest.mark.parametrize(
    ("data", "what"),
    [
        ('{"a": 1}\n'.encode("utf-16"), "invalid UTF-8 at byte 1 of the line"),
        (b'[{"a": 1}, {"a": 2}]\n', "the line is a list, not a JSON object"),
        (b'{\n  "a": 1\n}\n', "not valid JSON: "),
    ],
)
@pytest.mark.parametrize("sql", [None, "SELECT a FROM input"])
def test_a_file_without_a_readable_row_says_what_is_wrong_with_its_first(
    tmp_path: Path, data: bytes, what: str, sql: str | None
) -> None:
    (tmp_path / "x.jsonl").write_bytes(data)
    with pytest.raises(InputError) as refused, open_input(str(tmp_path / "x.jsonl"), sql=sql) as dataset:
        dataset.refuse_unreadable()
    said = str(refused.value)
    assert said.startswith(f"{tmp_path}/x.jsonl:1: {what}") and "no row tells the columns" in said


@pytest.mark.parametrize("data", ["", "{}\n", 'x\n{"a": 1}\n'])
def test_a_file_that_was_read_is_not_refused(tmp_path: Path, data: str) -> None:
    (tmp_path / "x.jsonl").write_text(data)
    with open_input(str(tmp_path / "x.jsonl")) as dataset:
        dataset.refuse_unreadable()
