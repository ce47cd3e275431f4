"""A subset file: picked rows come back as they were, with their numbers and their errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bulkrun.data.inputs.batch import MAX_BATCH_BYTES, InputBatch, Position
from bulkrun.data.inputs.subset import PICK_SCHEMA, _gathered, open_subset, read_targets, write_subset
from bulkrun.errors import InputError
from bulkrun.request import RowError

SCHEMA = pa.schema(
    [("text", pa.string()), ("nested", pa.struct([("a", pa.list_(pa.int32()))])), ("none", pa.struct([]))]
)


def batches(count: int, size: int, bad: set[int]) -> Iterator[InputBatch]:
    """An input of `count` rows in batches of `size`; those in `bad` could not be read."""
    for start in range(0, count, size):
        rows = range(start, min(start + size, count))
        values = [
            dict.fromkeys(SCHEMA.names) if row in bad else {"text": f"t{row}", "nested": {"a": [row]}, "none": {}}
            for row in rows
        ]
        errors = {row - start: RowError("bad_input", f"line {row}") for row in rows if row in bad}
        yield InputBatch(Position(0, start), pa.RecordBatch.from_pylist(values, schema=SCHEMA), errors)


def picks(positions: list[int], size: int) -> Iterator[pa.RecordBatch]:
    for start in range(0, len(positions), size):
        some = positions[start : start + size]
        rows = [{"position": p, "row": 1000 - p, "row_key": f"k{p}", "keep_success": p % 2 == 0} for p in some]
        yield pa.RecordBatch.from_pylist(rows, schema=PICK_SCHEMA)


def test_single_rows_are_gathered_into_tables_of_the_usual_size_whatever_they_were_cut_out_of() -> None:
    whole = pa.RecordBatch.from_pydict({"key": [f"{row:032}" for row in range(100_000)]})
    rows = (whole.slice(row, 1) for row in range(0, 100_000, 40))
    assert [table.num_rows for table in _gathered(rows)] == [1024, 1024, 452]
    large = pa.RecordBatch.from_pydict({"text": ["x" * (MAX_BATCH_BYTES // 2)]})
    assert [table.num_rows for table in _gathered(iter([large] * 5))] == [2, 2, 1]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 40), st.integers(1, 9), st.integers(1, 9), st.sets(st.integers(0, 39)), st.sets(st.integers(0, 39))
)
def test_picked_rows_come_back_as_they_were(
    tmp_path: Path, count: int, size: int, pick_size: int, picked: set[int], bad: set[int]
) -> None:
    positions = sorted(p for p in picked if p < count)
    path = tmp_path / "input.subset"
    path.unlink(missing_ok=True)
    write_subset(path, SCHEMA, batches(count, size, bad), picks(positions, pick_size), len(positions))
    with open_subset(path) as dataset:
        assert dataset.schema == SCHEMA and dataset.num_rows == len(positions)
        found = list(dataset.batches())
    texts = [row["text"] for batch in found for row in batch.rows.to_pylist()]
    assert texts == [None if p in bad else f"t{p}" for p in positions]
    assert [n for batch in found if batch.numbers for n in batch.numbers.to_pylist()] == [1000 - p for p in positions]
    messages = [batch.errors[i].message for batch in found for i in sorted(batch.errors)]
    assert messages == [f"line {p}" for p in positions if p in bad]
    targets = read_targets(path)
    assert targets.rows.to_pylist() == [1000 - p for p in positions]
    assert targets.keys.to_pylist() == [f"k{p}" for p in positions]
    assert targets.keep_success.to_pylist() == [p % 2 == 0 for p in positions]


def test_reading_goes_on_from_any_position_and_with_any_columns(tmp_path: Path) -> None:
    path = tmp_path / "input.subset"
    write_subset(path, SCHEMA, batches(3000, 100, set()), picks(list(range(2500)), 700), 2500)
    with open_subset(path) as dataset:
        for start in (0, 1, 1023, 1024, 2499):
            rest = [
                row for batch in dataset.select(["text"]).batches(Position(0, start)) for row in batch.rows.to_pylist()
            ]
            assert rest == [{"text": f"t{row}"} for row in range(start, 2500)]
        first = next(dataset.batches(Position(0, 7)))
        assert first.head(2).numbers is not None and first.head(2).numbers.to_pylist() == [993, 992]


def test_an_input_that_lacks_picked_rows_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="of 6 rows to run only 5 are still there"):
        write_subset(tmp_path / "s", SCHEMA, batches(5, 5, set()), picks([0, 1, 2, 3, 4, 9], 10), 6)
