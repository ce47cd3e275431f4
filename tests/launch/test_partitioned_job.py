"""`jobs/partitioned.yaml` as it is shipped, on fewer rows: folders, then errors mended, then few files."""

from __future__ import annotations

import shutil
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from bulkrun.cli import main
from bulkrun.data.results.query import run_query
from bulkrun.job.store.run_dir import RunDir
from tests.job.without_model import start_without_model

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    modules = ["ast", "_abc", "base64", "Queue"]
    rows = [
        {
            "id": f"f{row}",
            "module": modules[row % 4],
            "name": f"f{row}",
            "source": f"def f{row}(items):\n    '''all of them'''\n    return [item for item in items if item]\n"
            + ("    # a long tail\n" * 60 if row == 5 else ""),
            "docstring": "it has one" if row % 3 == 0 else None,
        }
        for row in range(12)
    ]
    (tmp_path / "data").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data" / "functions.parquet")
    shutil.copy(ROOT / "jobs" / "partitioned.yaml", tmp_path / "job.yaml")
    monkeypatch.chdir(tmp_path)
    start_without_model(monkeypatch)
    return tmp_path


def bulkrun(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), catch_exceptions=False)


def test_results_lie_in_folders_failed_rows_are_mended_there_and_parts_become_few(folder: Path) -> None:
    done = bulkrun("submit", "job.yaml", "--set", "engine.max_model_len=120", "--set", "sampling.max_tokens=4")
    assert done.exit_code == 3, done.stderr
    assert "out/by_letter/**/*.parquet" in done.stderr
    run = RunDir(folder / "out" / "by_letter")
    folders = {str(path.parent.relative_to(run.root)) for path in run.parts().values()}
    assert folders == {f"letter={letter}/documented={kind}" for letter in "abq" for kind in ("true", "false")}
    assert bulkrun("compact", str(run.root)).exit_code == 0
    assert bulkrun("retry", str(run.root), "--failed", "--set", "run.on_too_long=truncate_right").exit_code == 0
    before = run_query(run.root, "SELECT * FROM results ORDER BY row")
    compacted = bulkrun("compact", str(run.root), "--json")
    assert compacted.exit_code == 0 and '"parts_after": 6' in compacted.stdout, compacted.stdout
    assert run_query(run.root, "SELECT * FROM results ORDER BY row") == before
    assert before.num_rows == 12 and before["error_code"].null_count == 12
    assert bulkrun("verify", str(run.root)).exit_code == 0
    sql = f"SELECT letter, documented, count(*) FROM read_parquet('{run.root}/**/*.parquet') GROUP BY ALL ORDER BY ALL"
    assert duckdb.sql(sql).fetchall() == [
        ("a", "false", 4),
        ("a", "true", 2),
        ("b", "false", 2),
        ("b", "true", 1),
        ("q", "false", 2),
        ("q", "true", 1),
    ]


def test_a_partition_column_that_is_not_carried_over_is_refused_by_submit_and_validate(folder: Path) -> None:
    for command in ("submit", "validate"):
        refused = bulkrun(command, "job.yaml", "--set", "output.partition_by=[leter]")
        assert refused.exit_code == 2
        assert "output.partition_by: column 'leter'" in refused.stderr and "did you mean 'letter'?" in refused.stderr
