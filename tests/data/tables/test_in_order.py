"""Rows of interleaved tables come out in order, whatever fits in memory; the oracle is `sorted`."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulkrun.data.tables import in_order
from bulkrun.data.tables.in_order import SLICE_ROWS, in_row_order

SCHEMA = pa.schema(
    [("row", pa.int64()), ("sample", pa.int32()), ("text", pa.string()), ("tags", pa.list_(pa.string()))]
)


def table(keys: list[tuple[int, int]]) -> pa.Table:
    rows = [
        {"row": row, "sample": sample, "text": f"{row}.{sample}", "tags": [str(row)] * sample} for row, sample in keys
    ]
    return pa.Table.from_pylist(rows, SCHEMA)


def keys_of(tables: Iterator[pa.Table]) -> list[tuple[int, int]]:
    keys = []
    for each in tables:
        assert 0 < each.num_rows <= SLICE_ROWS
        for row in each.to_pylist():
            assert (row["text"], row["tags"]) == (f"{row['row']}.{row['sample']}", [str(row["row"])] * row["sample"])
            keys.append((row["row"], row["sample"]))
    return keys


@given(
    st.lists(st.integers(0, 500), max_size=200, unique=True),
    st.integers(1, 3),
    st.integers(1, 9),
    st.sampled_from([1, 300, 2000, 2**26]),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60)
def test_any_deal_of_rows_to_tables_comes_out_sorted(
    rows: list[int], samples: int, tables: int, held_bytes: int, chance: random.Random
) -> None:
    keys = [(row, sample) for row in rows for sample in range(samples)]
    dealt: list[list[tuple[int, int]]] = [[] for _ in range(tables)]
    for key in keys:
        dealt[chance.randrange(tables)].append(key)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_order, "HELD_BYTES", held_bytes)
        patch.setattr(in_order, "NUM_PILES", 4)
        result = keys_of(in_row_order((table(deal) for deal in dealt), range(501)))
    assert result == sorted(keys)


def test_nothing_is_left_on_disk_even_when_the_reader_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_order, "HELD_BYTES", 100)
    reader = in_row_order((table([(row, 0)]) for row in range(99, -1, -1)), range(100), tmp_path)
    assert keys_of(iter([next(reader)]))[0] == (0, 0)
    reader.close()
    assert list(tmp_path.iterdir()) == []


def test_large_rows_come_few_at_a_time() -> None:
    """Lists of vectors are megabytes a row, and callers make Python's numbers of them."""
    vectors = pa.FixedSizeListArray.from_arrays(pa.array([0.5] * 32 * 200_000, pa.float32()), 200_000)
    columns = {
        "row": range(32),
        "sample": pa.array([0] * 32, pa.int32()),
        "vectors": vectors.cast(pa.list_(pa.float32())),
    }
    large = pa.table(columns)
    tables = list(in_row_order(iter([large]), range(32)))
    assert [row for each in tables for row in each["row"].to_pylist()] == list(range(32))
    assert max(each.nbytes for each in tables) <= in_order.SLICE_BYTES


def test_no_tables_are_no_rows() -> None:
    assert keys_of(in_row_order(iter([]), range(1))) == []


MEMORY = """
import sys
import pyarrow as pa
from pathlib import Path
from bulkrun.data.tables.in_order import in_row_order
PARTS, ROWS = 50, 2000
def tables():
    for part in range(PARTS):
        rows = list(range(part, PARTS * ROWS, PARTS))
        texts = [f"{row:06d}" * 500 for row in rows]
        yield pa.table({"row": rows, "sample": pa.array([0] * ROWS, pa.int32()), "text": texts})
def rss():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
before, most, expected = rss(), 0, 0
for table in in_row_order(tables(), range(PARTS * ROWS), Path(sys.argv[1])):
    rows = table["row"].to_pylist()
    assert rows == list(range(expected, expected + len(rows)))
    expected += len(rows)
    most = max(most, rss())
assert expected == PARTS * ROWS
print((most - before) // 2**20)
"""


def test_memory_is_bounded_when_the_payload_is_not(tmp_path: Path) -> None:
    """300 MB of rows in 50 interleaved tables: about HELD_BYTES and what sorting them takes are held at once."""
    done = subprocess.run([sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 220
