"""Runs with output options, planned by the real planner and answered by the fake engine: what readers see of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import duckdb
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from bulkrun.data.results.query import run_query
from bulkrun.errors import EXIT_ROW_ERRORS, JobFileError
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.views.row_errors import read_row_errors
from bulkrun.job.views.status import read_status
from bulkrun.job.views.verify import verify_run
from tests.job import small_runs
from tests.job.fake_engine import FakeEngine
from tests.job.plan.planning import make_plan, write_jsonl
from tests.job.planned_runs import spec_for, submit, write_input


def test_duckdb_pyarrow_and_query_show_every_partition_column_once_and_every_row_in_its_own(tmp_path: Path) -> None:
    path, rows = write_input(tmp_path)
    out = tmp_path / "night=1" / "out"  # a folder above the run that looks like a partition
    submit(spec_for(path, out, partition_by=["lang", "day", "ok"]))
    wanted = {row["id"]: (row["lang"], row["day"], row["ok"]) for row in rows}
    table = run_query(out, "SELECT * FROM results")
    assert (
        Counter(table.column_names)["lang"] == 1
        and "night" not in table.column_names
        and set(table.column_names) >= {"text", "id", "row", "response"}
    )
    assert [str(table.schema.field(name).type) for name in ("lang", "day", "ok")] == ["string", "date32[day]", "bool"]
    assert {row["id"]: (row["lang"], row["day"], row["ok"]) for row in table.to_pylist()} == wanted
    plain = duckdb.sql(f"SELECT id, lang, ok::BOOLEAN FROM read_parquet('{out}/**/*.parquet')").fetchall()
    assert sorted(plain) == [(row["id"], row["lang"], row["ok"]) for row in rows]
    arrow = ds.dataset(out, partitioning="hive").to_table(["id", "lang", "ok"]).to_pylist()
    assert {row["id"]: row["lang"] for row in arrow} == {row["id"]: row["lang"] for row in rows}
    for part in RunDir(out).parts().values():
        assert not {"lang", "day", "ok"} & set(pq.read_schema(part).names)
    assert not list((out / ".bulkrun").rglob("*.parquet"))


def test_status_verify_errors_and_finish_work_with_folders(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "in.jsonl", [{"text": f"p{row}", "lang": "en" if row % 2 else "de"} for row in range(9)]
    )
    path.write_text(path.read_text() + "not json\n")
    outcome = submit(spec_for(path, tmp_path / "out", partition_by=["lang"]))
    run = RunDir(tmp_path / "out")
    assert outcome.totals and (outcome.totals.rows, outcome.totals.parts) == (10, 3)
    assert outcome.totals.exit_code == EXIT_ROW_ERRORS
    report = verify_run(run)
    assert report.ok and report.finished and report.rows == 10, report.problems
    status = read_status(run)
    assert (status.rows_done, status.shards_committed, status.state) == (10, 3, "completed_with_errors")
    assert read_row_errors(run).counts == {"bad_input": 1}
    assert {str(path.relative_to(run.root)).split("/")[0] for path in run.parts().values()} == {
        "lang=en",
        "lang=de",
        "lang=__HIVE_DEFAULT_PARTITION__",
    }


def test_an_interrupted_partitioned_run_continues_and_redoes_no_committed_part(tmp_path: Path) -> None:
    path, rows = write_input(tmp_path)
    spec = spec_for(path, tmp_path / "out", partition_by=["lang"], rows_per_file=7)
    steps = iter(range(60))
    assert submit(spec, engine=FakeEngine(), should_stop=lambda: next(steps, None) is None).state == "interrupted"
    before = {path: path.stat().st_ino for path in RunDir(tmp_path / "out").parts().values()}
    assert 0 < len(before) < 20
    assert submit(spec).state == "completed"
    after = RunDir(tmp_path / "out").parts().values()
    assert len(after) == 21 and {path: path.stat().st_ino for path in after if path in before} == before
    assert verify_run(RunDir(tmp_path / "out")).ok
    table = run_query(tmp_path / "out", "SELECT id FROM results")
    assert sorted(table["id"].to_pylist()) == [row["id"] for row in rows]


def test_a_part_in_another_partitions_folder_is_found_by_verify(tmp_path: Path) -> None:
    path, _ = write_input(tmp_path)
    submit(spec_for(path, tmp_path / "out", partition_by=["lang"]))
    part = next(iter(RunDir(tmp_path / "out").parts().values()))
    other = next(folder for folder in (tmp_path / "out").glob("lang=*") if folder != part.parent)
    part.rename(other / part.name)
    problem = verify_run(RunDir(tmp_path / "out")).problems[0]
    assert f"{other / part.name}: lies in another partition's folder; move it back to {part.parent}" in problem


@pytest.mark.parametrize("codec", ["zstd", "snappy", "gzip", "lz4", "none"])
def test_parts_are_written_with_the_codec_of_the_job_now(tmp_path: Path, codec: str) -> None:
    path, rows = write_input(tmp_path)
    started_with = spec_for(path, tmp_path / "out", compression="zstd")
    small_runs.enter(tmp_path / "out", started_with)
    make_plan(tmp_path / "out", started_with)
    submit(spec_for(path, tmp_path / "out", compression=codec))  # continues: no result depends on the codec
    found = {
        pq.read_metadata(part).row_group(0).column(0).compression for part in RunDir(tmp_path / "out").parts().values()
    }
    assert found == {{"none": "UNCOMPRESSED"}.get(codec, codec.upper())}
    assert verify_run(RunDir(tmp_path / "out")).ok
    assert run_query(tmp_path / "out", "SELECT id FROM results").num_rows == len(rows)


@pytest.mark.parametrize("rows_per_file", [10, 33, 1000])
def test_rows_per_file_is_the_most_that_a_part_holds(tmp_path: Path, rows_per_file: int) -> None:
    path, rows = write_input(tmp_path)
    submit(spec_for(path, tmp_path / "out", rows_per_file=rows_per_file))
    counts = [pq.read_metadata(part).num_rows for part in RunDir(tmp_path / "out").parts().values()]
    fewest = -(-len(rows) // rows_per_file)
    assert sum(counts) == len(rows) and max(counts) <= rows_per_file
    assert fewest <= len(counts) <= 1.3 * fewest, "files are cut by cost, so some are not full"


def test_an_unknown_partition_column_stops_before_anything_is_planned(tmp_path: Path) -> None:
    path, _ = write_input(tmp_path)
    with pytest.raises(JobFileError, match="did you mean 'lang'"):
        submit(spec_for(path, tmp_path / "out", partition_by=["lnag"]))
    assert not list(RunDir(tmp_path / "out").plan.glob("*"))
