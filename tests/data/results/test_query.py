from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bulkrun.data.results import parts, query
from bulkrun.data.results.parts import PartInfo
from bulkrun.data.results.query import run_query
from bulkrun.data.results.schema import output_schema
from bulkrun.errors import BulkrunError, InputError, RunError, UsageError
from tests.signalled import LONG_SELECT, signalled_after

SCHEMA = output_schema(pa.schema([("title", pa.string())]))


def write_part(run: Path, number: int, rows: int) -> None:
    write_table(run / f"part-{number:05d}.parquet", number, rows)


def write_table(path: Path, number: int, rows: int) -> None:
    values = [{"title": "t", "row": number * 100 + row, "sample": 0, "response": f"r{row}"} for row in range(rows)]
    pq.write_table(pa.Table.from_pylist(values, SCHEMA), path)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    root = tmp_path / "it's a run"
    (root / ".bulkrun" / "tmp").mkdir(parents=True)
    write_part(root, 0, 7)
    write_part(root, 2, 5)
    (root / ".bulkrun" / "tmp" / "half.tmp").write_bytes(b"PAR1 not whole")
    (tmp_path / "secret.parquet").write_bytes((root / "part-00000.parquet").read_bytes())
    return root


def test_results_are_the_rows_of_all_parts(run: Path) -> None:
    table = run_query(run, "SELECT count(*) AS n, max(row) AS last FROM results")
    assert table.to_pylist() == [{"n": 12, "last": 204}]


def test_a_run_that_was_moved_where_duckdb_reads_nothing_is_told_so(run: Path) -> None:
    moved = run.rename(run.with_name(os.fsdecode(b"caf\xe9")))
    with pytest.raises(InputError, match=r"caf\\udce9': the path is not UTF-8.*rename the folder"):
        run_query(moved, "SELECT 1 FROM results")


def test_no_progress_bar_comes_on_stdout_where_python_has_no_script() -> None:
    """There DuckDB takes itself to be in a terminal or a notebook, and after two seconds draws one."""
    code = (
        "from bulkrun.data.tables.duck import locked_connection as connect\n"
        "print(connect().execute(\"SELECT current_setting('enable_progress_bar')\").fetchone()[0])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_parts_that_appear_later_are_in_the_next_query(run: Path) -> None:
    write_part(run, 3, 2)
    assert run_query(run, "SELECT row FROM results").num_rows == 14


def test_queries_while_parts_are_published_never_fail_and_never_go_back(run: Path) -> None:
    def publish() -> None:
        for number in range(10, 40):
            temporary = run / ".bulkrun" / "tmp" / f"{number}.tmp"
            write_table(temporary, number, 3)
            os.link(temporary, run / f"part-{number:05d}.parquet")

    writer = threading.Thread(target=publish)
    counts = [12]
    writer.start()
    while writer.is_alive():
        counts.append(run_query(run, "SELECT count(*) AS n FROM results").column("n")[0].as_py())
    writer.join()
    assert counts == sorted(counts) and all(count % 3 == 0 for count in counts)
    assert run_query(run, "SELECT row FROM results").num_rows == 12 + 30 * 3


def test_values_that_arrow_would_change_are_duckdbs_text_of_them(run: Path) -> None:
    huge = 2**128 - 1
    sql = (
        f"SELECT {huge}::UHUGEINT AS h, row, {{'a': [{huge}::UHUGEINT]}} AS H, '12:00:00+05:30'::TIMETZ AS t, "
        "'101'::BIT AS b, 12::BIGNUM AS n, 7::HUGEINT AS s FROM results ORDER BY row DESC"
    )
    table = run_query(run, sql, limit=2)
    row = [str(huge), 204, f"{{'a': [{huge}]}}", "12:00:00+05:30", "101", "12", 7]
    assert [list(values) for values in zip(*table.to_pydict().values(), strict=True)] == [row, [row[0], 203, *row[2:]]]


def test_the_limit_cuts_the_result(run: Path) -> None:
    assert run_query(run, "SELECT row FROM results ORDER BY row DESC", limit=2).to_pydict() == {"row": [204, 203]}


def test_a_part_can_be_read_by_its_path(run: Path) -> None:
    path = str(run.resolve() / "part-00002.parquet").replace("'", "''")
    assert run_query(run, f"SELECT count(*) AS n FROM read_parquet('{path}')").to_pylist() == [{"n": 5}]


def test_a_partition_column_has_its_declared_type_whatever_its_folders_look_like(tmp_path: Path) -> None:
    info = PartInfo("run", "plan", 0, "a", 1, 1, {}, 0, 0, {}, folder="code=007", partition_types={"code": "string"})
    (tmp_path / "code=007").mkdir()
    parts.write_part(tmp_path / "code=007" / "part-00000.parquet", pa.table({"row": [5]}), info)
    assert run_query(tmp_path, "SELECT * FROM results").to_pylist() == [{"row": 5, "code": "007"}]


@pytest.mark.parametrize("name", ["run[12]", "run*", "run?", "[!r]un"])
def test_a_run_whose_name_is_a_glob_is_that_run(tmp_path: Path, name: str) -> None:
    for folder, rows in (("run1", 3), ("run2", 4), (name, 5)):
        (tmp_path / folder).mkdir()
        write_part(tmp_path / folder, 0, rows)
    assert run_query(tmp_path / name, "SELECT row FROM results").num_rows == 5
    (tmp_path / name / "part-00000.parquet").unlink()
    with pytest.raises(UsageError, match="Permission Error"):
        run_query(tmp_path / name, f"SELECT * FROM '{tmp_path}/run1/part-00000.parquet'", schema=SCHEMA)


def test_before_the_first_part_results_are_empty_with_the_declared_schema(tmp_path: Path) -> None:
    table = run_query(tmp_path, "SELECT title, row FROM results", schema=SCHEMA)
    assert table.num_rows == 0 and table.schema == pa.schema([("title", pa.string()), ("row", pa.int64())])
    with pytest.raises(RunError, match="no results yet"):
        run_query(tmp_path, "SELECT 1")
    with pytest.raises(RunError, match="no such run directory"):
        run_query(tmp_path / "typo", "SELECT 1")


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELECT respons FROM results", "respons"),
        ("SELECT * FORM results", "syntax error"),
        ("SELECT * FROM result", "Did you mean"),
        ("SELECT 1; DROP VIEW results", "2 statements"),
        ("DELETE FROM results", "this is DELETE"),
        ("COPY results TO '{run}/x.csv'", "this is COPY"),
        ("ATTACH '{run}/x.db'", "this is ATTACH"),
        ("SET enable_external_access = true", "this is SET"),
        ("INSTALL httpfs", "only SELECT"),
        ("LOAD httpfs", "only SELECT"),
        ("CREATE TABLE x AS SELECT 1", "this is CREATE"),
        ("PRAGMA database_list", "this is PRAGMA"),
        ("CALL pragma_version()", "this is CALL"),
        ("SELECT * FROM read_parquet('{run}/../secret.parquet')", "Permission Error"),
        ("SELECT * FROM read_text('/etc/hostname')", "Permission Error"),
        ("SELECT * FROM glob('/etc/*')", "Permission Error"),
        ("SELECT * FROM read_csv('https://example.org/x.csv')", "Error"),
        ("SELECT * FROM query('DROP VIEW results')", "Error"),
        ("WITH x AS (DELETE FROM results RETURNING *) SELECT * FROM x", "rror"),
    ],
)
def test_what_is_not_one_select_over_the_run_is_refused_readably(run: Path, sql: str, message: str) -> None:
    before = sorted(run.rglob("*"))
    quoted = str(run.resolve()).replace("'", "''")
    with pytest.raises(UsageError, match=r"^query: ") as caught:
        run_query(run, sql.replace("{run}", quoted))
    assert message in str(caught.value)
    assert sorted(run.rglob("*")) == before


def test_a_signal_ends_a_query_with_what_its_handler_raises(run: Path) -> None:
    began = time.monotonic()
    with signalled_after(0.3):
        run_query(run, LONG_SELECT)
    assert time.monotonic() - began < 20, "DuckDB was to be interrupted, in all of its threads"


def test_a_disk_that_fails_is_not_the_querys_mistake(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise duckdb.IOException(
            'IO Error: Could not read from file "part-00000.parquet": Stale file handle\n\nLINE 1: CREATE'
        )

    monkeypatch.setattr(query, "view_of_parts", fail)
    with pytest.raises(RunError, match=r"query: .*part-00000.*Stale file handle; .*run the same command again$"):
        run_query(run, "SELECT 1")
    monkeypatch.undo()
    nowhere = str(run / "none.parquet").replace("'", "''")
    with pytest.raises(UsageError, match="No files found"):
        run_query(run, f"SELECT * FROM '{nowhere}'")


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("locked_connection", duckdb.OutOfMemoryException("Out of Memory Error: Allocation failure")),
        ("locked_connection", MemoryError("no room")),
        ("interruptible", RuntimeError("can't start new thread")),
    ],
)
def test_a_shortage_of_memory_or_threads_is_said(
    call: str, error: Exception, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(query, call, fail)
    with pytest.raises(BulkrunError, match=r"^query: .*(failure|no room|thread); give the process more memory or thr"):
        run_query(run, "SELECT 1")
    monkeypatch.setattr(query, call, lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_query(run, "SELECT 1")
