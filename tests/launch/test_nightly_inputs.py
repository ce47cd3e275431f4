"""Inputs that a night must not take at their word: empty ones, cut ones, ones whose columns have other types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bulkrun.errors import InputError
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.views.verify import verify_run
from bulkrun.launch.preview import plan_job
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
