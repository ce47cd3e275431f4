"""What is said of, and to, workers that somebody else started."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from bulkrun.cli import main
from bulkrun.data.storage.durable import append_line, replace_json
from bulkrun.errors import ExecutorError
from bulkrun.executors.slurm import QueuedJob
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.workers import Worker, WorkerState
from bulkrun.launch.runs import control
from bulkrun.launch.runs.control import cancel_run, status_with_queue, statuses_with_queue
from tests.job.small_runs import enter, job, make_rows, start


def test_a_cancel_promises_nothing_for_those_that_are_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bulkrun.job.store.workers.HEARTBEAT_S", 0.01)
    run, _ = enter(tmp_path / "out", job(tmp_path / "out"))
    for name, age_s in (("here", 0), ("away", 25)):
        path = run.workers / f"{name}.json"
        replace_json(path, asdict(WorkerState(replace(Worker.this_process(), id=name), 3, "runner")))
        os.utime(path, (time.time() - age_s,) * 2)
    stopped = cancel_run(run)
    assert (sorted(stopped.workers), stopped.silent) == (["away", "here"], ["away"])
    (run.workers / "here.json").unlink()
    said = CliRunner().invoke(main, ["cancel", str(run.root)]).stderr
    assert "may stop late or not at all: away" in said and "within seconds" not in said


def test_a_cancel_names_who_works_on_a_change_of_a_finished_run(tmp_path: Path) -> None:
    start(tmp_path / "out", make_rows(5), job(tmp_path / "out"))
    run = RunDir(tmp_path / "out")
    assert cancel_run(run).finished
    enter(run.staged.root, job(run.staged.root))
    here = WorkerState(Worker.this_process("w"), 3, "supervisor")
    replace_json(run.staged.worker_file("w"), asdict(here))
    stopped = cancel_run(run)
    assert (stopped.workers, stopped.finished) == (["w"], False)


def test_a_run_that_nobody_works_on_while_its_array_is_in_the_queue_is_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = enter(tmp_path / "out", job(tmp_path / "out"))
    assert status_with_queue(run)[0].state == "interrupted"
    monkeypatch.setattr(control, "queued_jobs", lambda run: [QueuedJob("7_[0-3]", "PENDING", "", "Resources")])
    status, queue = status_with_queue(run)
    assert (status.state, status.message) == ("queued", "Slurm job 7_[0-3] is PENDING (Resources)")
    assert status.next_command == f"bulkrun status {run.root}" and len(queue) == 1


def beaten(run: RunDir, age_s: float, **state: str) -> None:
    """A worker of another node, whose last heartbeat is that old."""
    worker = Worker("w", "another node", 1, "1")
    replace_json(run.worker_file("w"), asdict(WorkerState(worker, 3, "runner", **state)))
    os.utime(run.worker_file("w"), (time.time() - age_s,) * 2)


@pytest.mark.parametrize(
    ("job_state", "ended", "state", "message"),
    [
        ("PENDING", None, "queued", r"Slurm job 7_0 is PENDING \(BeginTime\)"),  # its node failed: queued again
        ("SUSPENDED", None, "queued", "Slurm job 7_0 is SUSPENDED.*: it goes on when"),
        ("RUNNING", None, "stalled", "silent for .* s; Slurm job 7_0 is RUNNING"),
        (
            "PENDING",
            "failed",
            "queued",
            r"Slurm job 7_0 is PENDING \(BeginTime\); before that it failed: no such model",
        ),
    ],
)
def test_what_the_queue_says_of_a_run_counts_more_than_a_worker_that_is_silent_or_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job_state: str, ended: str | None, state: str, message: str
) -> None:
    run, _ = enter(tmp_path / "out", job(tmp_path / "out"))
    beaten(run, 600, **({"ended": ended, "message": "no such model"} if ended else {}))
    monkeypatch.setattr(control, "queued_jobs", lambda run: [QueuedJob("7_0", job_state, "n1", "BeginTime")])
    status, _ = status_with_queue(run)
    assert status.state == state and re.search(message, status.message or ""), status.message


@pytest.mark.parametrize(
    ("shown", "accounted", "ended"),
    [
        ("TIMEOUT", "", "Slurm job 7 ended: 1 of 2 TIMEOUT, it was ended at its time limit; a longer slurm.time"),
        (None, "bulkrun-q|NODE_FAIL\nbulkrun-q|COMPLETED", "Slurm job 7 ended: 1 of 2 NODE_FAIL, its node failed"),
        (None, "bulkrun-q|CANCELLED by 1000", "Slurm job 7 ended: CANCELLED, bulkrun cancel, scancel or an admin"),
        (None, "bulkrun-q|FAILED|75:0\nbulkrun-q|FAILED|1:0", "1 of 2 EXIT 75, it saved what it had.* 1 of 2 FAILED"),
        ("FAILED Reason=NonZeroExitCode Dependency=(null) ExitCode=75:0", "", "7 ended: 1 of 2 EXIT 75, it saved"),
        ("FAILED Reason=NonZeroExitCode Dependency=(null) ExitCode=1:0", "", "7 ended: 1 of 2 FAILED, its script"),
        (None, "another|NODE_FAIL", None),  # whose id this is now
        (None, None, None),
    ],
)
def test_a_run_whose_array_was_ended_from_outside_says_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: str | None, accounted: str | None, ended: str | None
) -> None:
    run, _ = enter(tmp_path / "out", job(tmp_path / "out"))
    beaten(run, 600)
    run.slurm.mkdir()
    for job_id in ("6", "7"):  # the last one counts
        append_line(run.slurm_jobs, json.dumps({"job_id": job_id, "script": "s.sh", "name": "bulkrun-q"}).encode())
    words = [f"JobId=7 JobName=bulkrun-q UserId=u(1) JobState={state} Reason=x" for state in ("COMPLETED", shown)]
    programs = {
        "squeue": "true",
        "scontrol": "echo 'Invalid job id specified' >&2; exit 1"
        if shown is None
        else "echo '" + "\n".join(words) + "'",
        "sacct": "echo disabled >&2; exit 1" if accounted is None else f"echo '{accounted}'",
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    status, _ = status_with_queue(run)
    assert status.state == ("interrupted" if ended else "stalled")
    assert ended is None or re.search(ended, status.message or "")


@pytest.mark.parametrize(
    ("shown", "said", "state"),
    [
        ("another", {}, "stalled"),
        ("bulkrun-q2", {}, "stalled"),
        ("bulkrun-q", {"ended": "failed", "message": "no such model"}, "failed"),
    ],
)
def test_how_slurm_ended_another_job_of_that_id_or_one_whose_worker_said_why_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: str, said: dict[str, str], state: str
) -> None:
    run, _ = enter(tmp_path / "out", job(tmp_path / "out"))
    beaten(run, 600, **said)
    run.slurm.mkdir()
    append_line(run.slurm_jobs, b'{"job_id": "7", "script": "s.sh", "name": "bulkrun-q"}')
    words = f"JobId=7 JobName={shown} UserId=u(1) JobState=FAILED Reason=x"
    for name, body in {"squeue": "true", "scontrol": f"echo '{words}'", "sacct": "exit 1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert status_with_queue(run)[0].state == state


def test_a_queue_that_cannot_be_asked_is_said_and_a_cancel_says_whom_it_did_not_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = enter(tmp_path / "out", job(tmp_path / "out"))
    run.slurm.mkdir()
    (run.slurm / "s.sh").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    status, queue = status_with_queue(run)
    assert queue == [] and "Slurm's queue, in which it may be, cannot be asked from here (squeue: not found" in str(
        status.message
    )
    with pytest.raises(ExecutorError, match=r"squeue: not found.*who is at work was told to stop, jobs that wait"):
        cancel_run(run)
    assert run.cancelled.exists()


def test_list_tells_queued_runs_and_asks_the_queue_once_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text(
        f"#!/bin/sh\necho asked >> {tmp_path}/asked\necho '8|7|7_[0-3]|PENDING||Resources|bulkrun-q|/|/s.sh'\n"
    )
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(squeue.parent), prepend=os.pathsep)
    for name, job_id in {"waits": "7", "stopped": "6", "local": None}.items():
        run, _ = enter(tmp_path / name, job(tmp_path / name))
        run.slurm.mkdir()
        if job_id is not None:
            append_line(run.slurm_jobs, json.dumps({"job_id": job_id, "script": "s.sh"}).encode())
    shown = json.loads(CliRunner().invoke(main, ["list", str(tmp_path), "--json"]).stdout)["runs"]
    assert [one["state"] for one in shown] == ["interrupted", "interrupted", "queued"]
    assert (tmp_path / "asked").read_text() == "asked\n"
    squeue.unlink()
    assert [one.state for one in statuses_with_queue(tmp_path)] == ["interrupted"] * 3
