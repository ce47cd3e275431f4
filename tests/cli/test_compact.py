"""`bulkrun compact`: what it says."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result

from bulkrun.cli import main
from tests.job.planned_runs import spec_for, submit, write_input


def compact(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["compact", *arguments], catch_exceptions=False)


def test_says_what_became_of_the_parts_and_that_the_second_time_does_nothing(tmp_path: Path) -> None:
    path, rows = write_input(tmp_path)
    submit(spec_for(path, tmp_path / "out", rows_per_file=10))
    done = compact(str(tmp_path / "out"), "--rows-per-file", "100", "--json")
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert (found["parts_after"], found["rows"], found["worked"]) == (2, len(rows), True)
    again = compact(str(tmp_path / "out"), "--rows-per-file", "100")
    assert again.exit_code == 0 and "already compacted (2 parts, 140 rows)" in again.stderr and again.stdout == ""
    assert "2 parts became 1 (140 rows)" in compact(str(tmp_path / "out")).stderr
    assert "already compacted (1 part, 140 rows)" in compact(str(tmp_path / "out")).stderr


def test_a_directory_that_is_no_run_ends_with_the_reason(tmp_path: Path) -> None:
    refused = compact(str(tmp_path))
    assert refused.exit_code == 1 and "not a run" in refused.stderr
