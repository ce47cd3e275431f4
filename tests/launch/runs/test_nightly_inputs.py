"""Inputs that a night must not take at their word: empty ones, cut ones, ones whose columns have other types."""

from __future__ import annotations

import shutil
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bulkrun.data.inputs import subset
from bulkrun.errors import InputError, ResumeError, RunError
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.update import staging
from bulkrun.job.views.verify import verify_run
from bulkrun.launch.runs.preview import plan_job
from tests.launch.nights import Nights

TWO = [{"id": "a", "text": "one"}, {"id": "b", "text": "two"}]


@pytest.fixture
def nights(tmp_path: Path) -> Nights:
    return Nights(tmp_path)


def use_parquet(nights: Nights, rows: list[dict[str, Any]] | pa.Table) -> None:
    path = nights.folder / "rows.parquet"
    pq.write_table(rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows), path)
    nights.settings["input__path"] = str(path)


def use_csv(nights: Nights, rows: list[dict[str, Any]]) -> None:
    path = nights.folder / "rows.csv"
    path.write_text("\n".join(["id,text", *(f"{row['id']},{row['text']}" for row in rows), ""]))
    nights.settings["input__path"] = str(path)


def export(nights: Nights, kind: str, rows: list[dict[str, Any]]) -> None:
    """What an exporter leaves: where there is no row a table has its columns all the same."""
    if kind == "csv":
        use_csv(nights, rows)
    elif kind == "parquet":
        use_parquet(nights, pa.Table.from_pylist(rows, pa.schema([("id", pa.string()), ("text", pa.string())])))
    else:
        nights.write([*rows, {"id": "z", "text": "not asked for"}])
        nights.settings["input__sql"] = "SELECT * FROM input WHERE id <> 'z'"


@pytest.mark.parametrize("kind", ["parquet", "csv", "sql"])
def test_an_export_that_failed_drops_no_result(nights: Nights, kind: str) -> None:
    nights.settings["run__on_vanished"] = "drop"
    export(nights, kind, TWO)
    nights.submit()
    export(nights, kind, [])
    message = "input.sql: gives no rows at all" if kind == "sql" else "input.path: holds no rows at all"
    with pytest.raises(InputError, match=message):
        nights.submit()
    with pytest.raises(InputError, match=message):
        plan_job(nights.spec())
    assert set(nights.results()) == {"a", "b"}
    assert nights.submit(run__on_vanished="keep").exit_code == 0
    export(nights, kind, TWO[1:])
    assert nights.submit().totals.rows == 1
    assert verify_run(RunDir(nights.out)).ok


def test_rows_that_run_limit_leaves_unread_are_not_taken_for_vanished(nights: Nights) -> None:
    nights.settings["run__on_vanished"] = "drop"
    rows = [{"id": f"r{number}", "text": f"text {number}"} for number in range(6)]
    nights.write([*rows, '{"id": "torn'])
    nights.submit()
    assert plan_job(nights.spec(run__limit=2))[1] == nights.submit(run__limit=2).changes
    done = nights.submit(run__limit=2)
    assert not done.worked and done.totals.rows == 7 and done.changes is not None
    assert (done.changes["unchanged"], done.changes["vanished"], done.changes["beyond_limit"]) == (2, 0, 5)
    nights.write(rows[1:])
    done = nights.submit(run__limit=10)
    assert done.changes == {"new": 0, "changed": 0, "failed": 0, "unchanged": 5, "vanished": 2}
    assert set(nights.results()) == {row["id"] for row in rows[1:]}, "within the limit all of the input was read"


def priced(kind: pa.DataType, *prices: int) -> pa.Table:
    rows = {"id": [f"r{number}" for number in range(len(prices))], "text": [f"text {price}" for price in prices]}
    return pa.table({**rows, "price": pa.array(prices, pa.int64()).cast(pa.decimal128(30, 2)).cast(kind)})


@pytest.mark.parametrize("nested", [False, True])
def test_whole_numbers_over_decimals_are_refused_before_anything_runs(nights: Nights, nested: bool) -> None:
    def use(table: pa.Table) -> None:
        prices = table["price"].combine_chunks()
        in_list = pa.ListArray.from_arrays(pa.array(range(len(prices) + 1), pa.int32()), prices)
        use_parquet(nights, table.set_column(2, "price", in_list if nested else prices))

    use(priced(pa.decimal128(20, 2), 1, 2))
    nights.submit()
    use(priced(pa.int64(), 1, 2, 3))
    with pytest.raises(ResumeError, match=r"price: .*decimal128\(20, 2\).* -> .*int64"):
        nights.submit()
    assert nights.ran == 0 and not RunDir(nights.out).staged.root.exists()
    use(priced(pa.decimal128(10, 2), 1, 2, 3))
    assert nights.submit().totals.rows == 3


@pytest.mark.parametrize("nested", [False, True])
def test_decimals_over_floats_are_refused_as_they_would_be_rounded(nights: Nights, nested: bool) -> None:
    def use(kind: pa.DataType, *prices: Any) -> None:
        column = pa.array([{"all": [price]} for price in prices], pa.struct({"all": pa.list_(kind)}))
        rows = {"id": [f"r{number}" for number in range(len(prices))], "text": ["text"] * len(prices)}
        use_parquet(nights, pa.table({**rows, "price": column if nested else pa.array(prices, kind)}))

    use(pa.float64(), 1.5)
    nights.submit()
    use(pa.decimal128(20, 4), Decimal("1.5"), Decimal("1234567890123456.7891"))
    with pytest.raises(ResumeError, match=r"price: .*double.* -> .*decimal128\(20, 4\)(.|\n)*cast them in input\.sql"):
        nights.submit()
    assert nights.ran == 0 and not RunDir(nights.out).staged.root.exists()
    use(pa.float32(), 1.5, 2.5)
    assert nights.submit().totals.rows == 2


@pytest.mark.parametrize(
    ("first", "tonight", "kept"),
    [
        ([3, "n/a"], [3, 5], ["3", "5"]),
        ([{"a": 1}, {"a": 2}], [{"a": 1}, {}], [{"a": 1}, {"a": None}]),
        ([1.5, 2.0], [2, 2], [2.0, 2.0]),
        ([[1.5], [2.0]], [[2], [2]], [[2.0], [2.0]]),
        ([1, 2], [1.0, 2.0], [1, 2]),
    ],
    ids=["text", "object", "double", "in a list", "whole"],
)
def test_values_that_would_do_with_another_type_keep_that_of_the_results(
    nights: Nights, first: list[Any], tonight: list[Any], kept: list[Any]
) -> None:
    nights.settings["prompt__template"] = "Say {{ text }} {{ note }}"
    nights.write([{**row, "note": note} for row, note in zip(TWO, first, strict=True)])
    nights.submit()
    nights.write([{**TWO[1], "note": tonight[1]}, {"id": "c", "text": "three", "note": tonight[0]}])
    same = first[1] == tonight[1]
    assert nights.submit().changes == {"new": 1, "changed": not same, "failed": 0, "unchanged": same, "vanished": 1}
    results = nights.results()
    assert [results["c"]["note"], results["b"]["note"]] == kept


def test_a_night_of_empty_objects_alone_has_the_columns_of_the_results(nights: Nights) -> None:
    nights.write([{**row, "note": {"a": 1}} for row in TWO])
    nights.submit()
    nights.write([{"id": "c", "text": "three", "note": {}}])
    assert nights.submit().exit_code == 0
    assert nights.results()["c"]["note"] == {"a": None}


def test_an_id_of_bytes_that_are_no_text_is_its_rows_error(nights: Nights) -> None:
    def named(*ids: bytes) -> pa.Table:
        return pa.table({"id": pa.array(ids, pa.binary()), "text": [f"text {id_!r}" for id_ in ids]})

    use_parquet(nights, named(b"a", b"\xff"))
    assert nights.submit().totals.errors == {"bad_input": 1}
    assert "column 'id' is not valid UTF-8" in nights.results()[b"\xff"]["error_message"]
    use_parquet(nights, named(b"a", b"\xff", b"c"))
    assert nights.submit().changes == {"new": 1, "changed": 0, "failed": 0, "unchanged": 2, "vanished": 0}
    assert verify_run(RunDir(nights.out)).ok
    plain = Nights(nights.folder / "plain", {"input__path": nights.settings["input__path"]})
    assert plain.submit(run__incremental=False).totals.errors == {"bad_input": 1}, "not just a row without an id"


def test_a_night_that_failed_is_closed_before_it_is_removed_and_says_why_it_failed(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    nights.write(TWO)
    nights.submit()
    nights.write([*TWO, {"id": "c", "text": "three"}])
    held: list[str] = []

    def fail(*_: Any) -> pa.RecordBatch:
        raise InputError("what is wrong with the input")

    def remove(path: Path) -> None:
        if path.exists():
            held.extend(str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.exists())
            shutil.rmtree(path)
            raise RunError(f"{path}: removing failed: Device or resource busy")  # NFS, of a file that is held open

    monkeypatch.setattr(subset, "_stored", fail)
    monkeypatch.setattr(staging, "remove_tree", remove)
    with pytest.raises(InputError, match="what is wrong with the input"):
        nights.submit()
    assert held and not [path for path in held if str(nights.out) in path]
