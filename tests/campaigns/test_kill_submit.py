"""A quick slice of the kill campaign on the real `bulkrun submit`; the long form is a command (see kill_submit.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaigns.kill_submit import campaign, parse


def test_rows_are_exactly_once_and_equal_after_kills_with_a_second_worker(tmp_path: Path) -> None:
    report = campaign(tmp_path, parse(["--kills", "4", "--rows", "100", "--second-worker"]))
    assert report["failed_reads"] == 0
    assert report["rows"] == 100


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thirty_kills_with_samples(tmp_path: Path) -> None:
    report = campaign(tmp_path, parse(["--kills", "30", "--rows", "900", "--samples", "2", "--second-worker"]))
    assert report["rows"] == 1800
