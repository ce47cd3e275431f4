"""What a cancelled command does about the Slurm job that it is in."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from bulkrun.errors import Interrupted
from bulkrun.executors.allocation import Allocation
from bulkrun.job.store.cancel import request_cancel
from bulkrun.job.store.run_dir import RunDir
from bulkrun.launch.processes.stoppable import stoppable
from tests.job.small_runs import enter, job


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return enter(tmp_path / "out", job(tmp_path / "out"))[0]


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """This process is in a Slurm job that comes back; the ids of jobs that were ended."""
    ended: list[str] = []
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_END_TIME", "4000000000")
    monkeypatch.setattr(Allocation, "comes_back", lambda job: True)
    monkeypatch.setattr(Allocation, "end", lambda job: ended.append(job.job_id))
    return ended


def test_a_cancelled_command_ends_the_slurm_job_that_would_start_it_again(run: RunDir, ended: list[str]) -> None:
    with pytest.raises(Interrupted, match="saved"), stoppable(run, ended.append):
        request_cancel(run)
        raise Interrupted("saved")
    assert ended == ["stopped by bulkrun cancel: Slurm job 7 is taken out of the queue", "7"], "said before the end"


def test_a_job_that_does_not_come_back_goes_on_with_what_else_its_owner_does_there(
    run: RunDir, ended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interactive one, or a script of several commands."""
    monkeypatch.setattr(Allocation, "comes_back", lambda job: False)
    with pytest.raises(Interrupted, match="saved"), stoppable(run, ended.append):
        request_cancel(run)
        raise Interrupted("saved")
    assert ended == []


def test_a_job_that_is_warned_of_its_end_comes_back(run: RunDir, ended: list[str]) -> None:
    with pytest.raises(Interrupted, match="SIGUSR1"), stoppable(run, print):
        os.kill(os.getpid(), signal.SIGUSR1)
    assert ended == []


def test_a_job_whose_time_is_up_stays_in_the_queue_for_its_next_turn(run: RunDir, ended: list[str]) -> None:
    with pytest.raises(Interrupted, match="its time limit"), stoppable(run, ended.append):
        raise Interrupted("stopped by its time limit")
    assert ended == []


def test_outside_of_slurm_there_is_nothing_to_end(
    run: RunDir, ended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID")
    with pytest.raises(Interrupted), stoppable(run, print):
        request_cancel(run)
        raise Interrupted("saved")
    assert ended == []
