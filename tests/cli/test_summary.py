"""What `submit` says of a finished run that nobody had to compute."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bulkrun.cli.summary import print_summary, saved, warn_of_duplicates
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import read_record
from bulkrun.job.store.run_totals import RunTotals
from bulkrun.job.update.cause import Retry
from bulkrun.job.update.staging import Update, close_staging, open_staging, staged_record
from bulkrun.job.update.update_claim import hold
from bulkrun.launch.runs.run import Submitted
from tests.job.bucket_runs import start_bucket_run
from tests.job.small_runs import job, make_rows, start
from tests.s3_server import Bucket

TOTALS = RunTotals("completed", 9, 1, 9, {}, 90, 9, 1, "run", "then", "now")


def test_the_summary_says_what_was_saved_and_is_silent_where_nothing_was() -> None:
    assert saved(TOTALS) == ""
    assert saved(replace(TOTALS, saved_generations=1234)) == "1,234 generations shared with another row"
    assert saved(replace(TOTALS, saved_generations=1)) == "1 generation shared with another row"
    everything = replace(TOTALS, saved_generations=2, cached_tokens=3, stopped=4)
    assert saved(everything).split(", ", 1)[1].startswith("3 prompt tokens found in the prefix cache, 4 outputs")


def test_the_rows_of_a_retry_are_said_as_what_they_were_not_as_how_they_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(tmp_path / "out", make_rows(3), job(tmp_path / "out"))
    print_summary(Submitted(RunDir(tmp_path / "out"), TOTALS, worked=True, changes={"failed": 1}), "")
    assert capsys.readouterr().err.startswith("rows: 1 that had failed before\ncompleted: ")


def test_whoever_leaves_a_finished_run_alone_hears_of_an_update_under_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(tmp_path / "out", make_rows(3), job(tmp_path / "out"))
    run, record = RunDir(tmp_path / "out"), read_record(RunDir(tmp_path / "out"))
    print_summary(Submitted(run, TOTALS, worked=False), "")
    assert "under way" not in capsys.readouterr().err
    asked = Retry(("sampling.stop=a b",), ("timeout",))
    with hold(run):
        open_staging(run, staged_record(run, record, record.job))
        close_staging(run, Update(asked, 1, 1, 3, 3, 1), lambda path: path.touch(), lambda: None)
    print_summary(Submitted(run, TOTALS, worked=False), "")
    command = f"bulkrun retry {run.root} --failed --set 'sampling.stop=a b' --code timeout"
    assert f"next     {command} (of a retry or" in capsys.readouterr().err


def test_a_finished_run_whose_bucket_lacked_something_says_what_was_brought(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bucket: Bucket
) -> None:
    start_bucket_run(tmp_path / "s", bucket.url("out"))
    run = RunDir(tmp_path / "s")
    print_summary(Submitted(run, replace(TOTALS, parts=3), worked=False, uploaded=1), " --fresh runs it again.")
    assert capsys.readouterr().err == (
        f"{run.root} is already finished; 1 of 3 parts and _SUCCESS were uploaded to {bucket.url('out')} "
        "(completed). --fresh runs it again.\n"
    )


def test_a_night_with_nothing_to_run_says_so_once_and_names_the_rows_that_wait(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(tmp_path / "out", make_rows(3), job(tmp_path / "out"))
    run, changes = RunDir(tmp_path / "out"), {"new": 0, "changed": 0, "failed": 0, "unchanged": 600, "vanished": 0}
    totals = replace(TOTALS, status="completed_with_errors", errors={"bad_input": 25})
    print_summary(Submitted(run, totals, worked=False, changes=changes), "")
    _, *said = capsys.readouterr().err.splitlines()
    assert said == [
        f"{run.root} has nothing to run (completed_with_errors).",
        f"  25 failed rows will run again only when the input changes: bulkrun errors {run.root}",
    ]
    print_summary(Submitted(run, totals, worked=False), "")
    assert "run again" not in capsys.readouterr().err


def test_the_summary_names_ids_that_repeat(capsys: pytest.CaptureFixture[str]) -> None:
    warn_of_duplicates({"count": 0, "examples": []})
    assert capsys.readouterr().err == ""
    warn_of_duplicates({"count": 1200, "examples": [{"id": "f0", "rows": [0, 5]}]})
    assert capsys.readouterr().err == (
        "  1,200 rows have the id of an earlier row ('f0' in rows 0, 5): `row` tells them apart\n"
    )


def test_failures_are_counted_in_samples_where_a_row_has_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside "9 rows x 2 samples" 3 failed samples may be of two rows."""
    start(tmp_path / "out", make_rows(3), job(tmp_path / "out"))
    totals = replace(TOTALS, samples=2, ok=15, errors={"timeout": 3})
    print_summary(Submitted(RunDir(tmp_path / "out"), totals, worked=True), "")
    assert "  3 samples failed with timeout: " in capsys.readouterr().err
    print_summary(Submitted(RunDir(tmp_path / "out"), totals, worked=False, changes={"unchanged": 9}), "")
    assert "  3 failed samples will run again only when " in capsys.readouterr().err
