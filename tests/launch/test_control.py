"""What is said of, and to, workers that somebody else started."""

from __future__ import annotations

from pathlib import Path

import pytest

from bulkrun.executors.slurm import QueuedJob
from bulkrun.launch import control
from bulkrun.launch.control import status_with_queue
from tests.job.small_runs import enter, job


def test_a_run_that_nobody_works_on_while_its_array_is_in_the_queue_is_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = enter(tmp_path / "out", job(tmp_path / "out"))
    assert status_with_queue(run)[0].state == "interrupted"
    monkeypatch.setattr(control, "queued_jobs", lambda run: [QueuedJob("7_[0-3]", "PENDING", "", "Resources")])
    status, queue = status_with_queue(run)
    assert (status.state, status.message) == ("queued", "Slurm job 7_[0-3] is PENDING (Resources)")
    assert status.next_command == f"bulkrun status {run.root}" and len(queue) == 1
