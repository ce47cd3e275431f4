"""Exports of whole runs of the fake engine: every row once, in input order, in every format."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bulkrun.data.storage.durable import temporary
from bulkrun.data.tables import in_order
from bulkrun.errors import RunError, UsageError
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.views.export import ExportReport, export_run
from bulkrun.job.views.export_target import ExportOptions
from tests.full_disk import file_size_limit
from tests.job.plan.planning import job as planning_job
from tests.job.plan.planning import write_parquet
from tests.job.planned_runs import submit
from tests.job.small_runs import enter, job, make_rows, oracle, start, write_plan


def run_of(folder: Path, rows: int = 60, **options: Any) -> tuple[RunDir, list[dict[str, Any]]]:
    """A finished run whose parts have interleaved rows, and its output rows by the oracle, in input order."""
    spec = job(folder / "run", **options)
    planned = make_rows(rows)
    shuffled = random.Random(5).sample(planned, len(planned))
    shards = [sorted(shuffled[at : at + 10], key=lambda row: row.row) for at in range(0, len(shuffled), 10)]
    start(folder / "run", [row for shard in shards for row in shard], spec)
    return RunDir(folder / "run"), oracle(planned, spec)


def export(run: RunDir, *arguments: Any, **options: Any) -> tuple[str, ExportReport]:
    """What goes to stdout, and the report."""
    stream = io.BytesIO()
    report = export_run(run, ExportOptions(*arguments, **options), stream)
    return stream.getvalue().decode(), report


def known(rows: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: row[name] for name in wanted[0]} for row in rows]


@pytest.mark.parametrize("held_bytes", [1, 2**26])
def test_rows_come_in_input_order_though_parts_are_interleaved(
    held_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_order, "HELD_BYTES", held_bytes)
    run, wanted = run_of(tmp_path, n=2, temperature=1.0)
    text, report = export(run, "jsonl")
    rows = [json.loads(line) for line in text.splitlines()]
    assert known(rows, wanted) == wanted
    assert (report.rows, report.finished) == (120, True)


def test_every_format_holds_the_same_rows(tmp_path: Path) -> None:
    run, wanted = run_of(tmp_path)
    export(run, "parquet", tmp_path / "all.parquet")
    assert known(pq.read_table(tmp_path / "all.parquet").to_pylist(), wanted) == wanted
    cells = list(csv.DictReader(io.StringIO(export(run, "csv")[0])))
    assert [(int(row["row"]), row["response"], row["error_code"]) for row in cells] == [
        (row["row"], row["response"] or "", row["error_code"] or "") for row in wanted
    ]


@pytest.mark.parametrize("urls", [[["a"], ["b"]], [b"\xff", b"b"], [{"q": 1}, {"q": 2}], [1, 2]])
def test_a_column_of_the_input_that_is_called_url_may_hold_anything(urls: list[Any], tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "in.parquet", {"text": ["a", "b"], "url": urls})
    submit(planning_job(path, output={"path": str(tmp_path / "run")}))
    text, report = export(RunDir(tmp_path / "run"), "openai")
    assert report.rows == len(text.splitlines()) == 2


@pytest.mark.parametrize("format_", ["openai", "jsonl", "csv", "parquet"])
def test_a_full_disk_is_told_with_the_users_file_wherever_it_is_met(format_: Any, tmp_path: Path) -> None:
    run, _ = run_of(tmp_path)
    target = tmp_path / "all.out"
    export(run, format_, target)
    target.rename(tmp_path / "whole")
    for limit in (100, (tmp_path / "whole").stat().st_size - 1):
        with (
            file_size_limit(limit),
            pytest.raises(RunError, match=r"/all(\.errors)?\.out: writing failed: .*ulimit -f"),
        ):
            export(run, format_, target, force=True)
        assert not target.exists() and not list(tmp_path.glob(".all*")), limit


def test_too_many_open_files_name_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows beyond what memory holds are dealt into 64 files at once, a shell's limit may be less."""
    run, _ = run_of(tmp_path)
    monkeypatch.setattr(in_order, "HELD_BYTES", 100)

    def refuse(**_: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(RunError, match=r"sorting the rows .*: Too many open files; raise the limit .*ulimit -n"):
        export(run, "csv", tmp_path / "all.csv")


def test_what_a_killed_export_of_the_same_file_left_is_removed_once_it_is_old(tmp_path: Path) -> None:
    run, _ = run_of(tmp_path)
    target = tmp_path / "a[1].csv"
    old, young, others = temporary(target), temporary(target), temporary(tmp_path / "a1.csv")
    for path in (old, young, others):
        path.touch()
    for path in (old, others):
        os.utime(path, (0, 0))
    export(run, "csv", target)
    assert target.exists() and [path.exists() for path in (old, young, others)] == [False, True, True]


@pytest.mark.parametrize("only", ["ok", "errors"])
def test_only_good_or_only_failed_rows(only: Any, tmp_path: Path) -> None:
    run, wanted = run_of(tmp_path)
    chosen = [row for row in wanted if (row["error_code"] is None) == (only == "ok")]
    assert chosen
    text, report = export(run, "jsonl", only=only)
    assert known([json.loads(line) for line in text.splitlines()], wanted) == chosen
    assert report.rows == len(chosen)


def test_openai_lines_split_into_output_and_error_file(tmp_path: Path) -> None:
    run, wanted = run_of(tmp_path)
    _, report = export(run, "openai", tmp_path / "out.jsonl")
    good, bad = ([row for row in wanted if (row["error_code"] is None) is ok] for ok in (True, False))
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(line["custom_id"], line["error"]) for line in lines] == [(str(row["row"]), None) for row in good]
    contents = [line["response"]["body"]["choices"][0]["message"]["content"] for line in lines]
    assert contents == [row["response"] for row in good]
    errors = [json.loads(line) for line in (tmp_path / "out.errors.jsonl").read_text().splitlines()]
    assert [(line["custom_id"], line["error"]["code"]) for line in errors] == [
        (str(row["row"]), row["error_code"]) for row in bad
    ]
    assert (report.output_lines, report.error_lines) == (len(good), len(bad))


def test_openai_lines_on_stdout_are_in_one_stream_in_input_order(tmp_path: Path) -> None:
    run, wanted = run_of(tmp_path)
    lines = [json.loads(line) for line in export(run, "openai")[0].splitlines()]
    assert [line["custom_id"] for line in lines] == [str(row["row"]) for row in wanted]
    errors = [json.loads(line) for line in export(run, "openai", only="errors")[0].splitlines()]
    assert errors == [line for line in lines if line["error"]]


def test_the_error_file_can_be_named_and_is_there_even_when_empty(tmp_path: Path) -> None:
    run, _ = run_of(tmp_path, 3)
    export(run, "openai", tmp_path / "out.jsonl", tmp_path / "bad.jsonl")
    assert (tmp_path / "bad.jsonl").read_bytes() == b""
    assert not (tmp_path / "out.errors.jsonl").exists()


def test_samples_of_a_row_are_the_choices_of_one_line(tmp_path: Path) -> None:
    run, wanted = run_of(tmp_path, n=3, temperature=1.0)
    export(run, "openai", tmp_path / "out.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [
        (line["custom_id"], choice["index"], choice["message"]["content"])
        for line in lines
        for choice in line["response"]["body"]["choices"]
    ] == [(str(row["row"]), row["sample"], row["response"]) for row in wanted if row["error_code"] is None]


def test_the_id_column_of_the_job_names_the_lines(tmp_path: Path) -> None:
    spec = job(tmp_path / "run").model_dump()
    spec["input"]["id"] = "doc"
    start(tmp_path / "run", make_rows(5), type(job(tmp_path)).model_validate(spec))
    lines = [json.loads(line) for line in export(RunDir(tmp_path / "run"), "openai")[0].splitlines()]
    assert [line["custom_id"] for line in lines] == [f"text {row}" for row in range(5)]


@pytest.mark.parametrize(
    ("ids", "want"),
    [
        ([b"ab", "é".encode()], ["ab", "é"]),
        (pa.array([0, 1], pa.timestamp("ns")), ["1970-01-01 00:00:00.000000000", "1970-01-01 00:00:00.000000001"]),
        ([True, False], ["true", "false"]),
    ],
)
def test_custom_ids_are_the_ids_that_the_run_itself_writes(tmp_path: Path, ids: Any, want: list[str]) -> None:
    path = write_parquet(tmp_path / "in.parquet", {"id": ids, "text": ["a", "b"]})
    submit(planning_job(path, input={"id": "id"}, output={"path": str(tmp_path / "run")}))
    lines = [json.loads(line) for line in export(RunDir(tmp_path / "run"), "openai")[0].splitlines()]
    assert [line["custom_id"] for line in lines] == want


def test_an_unfinished_run_is_refused_unless_its_part_is_wanted(tmp_path: Path) -> None:
    spec = job(tmp_path / "run", n=2)
    run, _ = enter(tmp_path / "run", spec)
    write_plan(run, make_rows(20), 10)
    with pytest.raises(RunError, match=r"not finished.*--partial"):
        export(run, "jsonl")
    text, report = export(run, "jsonl", partial=True)
    assert (text, report.finished, report.rows, report.missing) == ("", False, 0, 40)


def test_how_many_rows_are_missing_is_counted_once_the_plan_is_complete(tmp_path: Path) -> None:
    run, wanted = run_of(tmp_path)
    run.success.unlink()
    next(iter(run.parts().values())).unlink()
    text, report = export(RunDir(run.root), "jsonl", partial=True)
    rows = [json.loads(line) for line in text.splitlines()]
    assert [row for row in wanted if row["row"] in {row["row"] for row in rows}] == known(rows, wanted)
    assert (len(rows), report.missing) == (50, 10)
    run.plan_complete.unlink()
    assert export(RunDir(run.root), "jsonl", partial=True)[1].missing is None


def test_rows_that_are_missing_are_found_before_the_file_gets_its_name(tmp_path: Path) -> None:
    run, _ = run_of(tmp_path)
    next(iter(run.parts().values())).unlink()
    with pytest.raises(RunError, match=r"_SUCCESS says 60.*bulkrun verify"):
        export(RunDir(run.root), "jsonl", tmp_path / "out.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_flipped_byte_is_found_before_the_file_gets_its_name(tmp_path: Path) -> None:
    run, _ = run_of(tmp_path)
    part = next(iter(run.parts().values()))
    whole = part.read_bytes()
    part.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    with pytest.raises(RunError, match=part.name):
        export(run, "csv", tmp_path / "out.csv")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_file_in_the_way_is_kept_unless_forced(tmp_path: Path) -> None:
    run, _ = run_of(tmp_path, 5)
    for name in ("out.jsonl", "out.errors.jsonl"):
        (tmp_path / name).write_text("precious")
        with pytest.raises(UsageError, match=f"{name}.*--force"):
            export(run, "openai", tmp_path / "out.jsonl")
        assert (tmp_path / name).read_text() == "precious"
        (tmp_path / name).unlink()
    (tmp_path / "out.jsonl").write_text("old")
    export(run, "openai", tmp_path / "out.jsonl", force=True)
    assert "old" not in (tmp_path / "out.jsonl").read_text()


def test_a_target_that_cannot_be_is_said_before_anything_is_read(tmp_path: Path) -> None:
    run, _ = run_of(tmp_path, 5)
    for path, why in [
        (run.root / "all.parquet", "result directory"),
        (tmp_path / "none" / "x.csv", "no directory"),
        (tmp_path, "is a directory"),
        (Path("s3://bucket/all.csv"), "exports go to local files; .* pipe it there"),
    ]:
        with pytest.raises(UsageError, match=why):
            export(run, "csv", path, force=True)
    with pytest.raises(UsageError, match="--errors is for"):
        export(run, "csv", tmp_path / "x.csv", tmp_path / "y")
    with pytest.raises(UsageError, match="--errors: the same file"):
        export(run, "openai", tmp_path / "x", tmp_path / "x")


def test_two_exports_are_equal_byte_by_byte(tmp_path: Path) -> None:
    run, _ = run_of(tmp_path)
    assert export(run, "openai")[0] == export(run, "openai")[0]
