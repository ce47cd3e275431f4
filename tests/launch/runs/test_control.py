"""What is said of, and to, workers that somebody else started."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from bulkrun.cli import main
from bulkrun.data.storage.durable import append_line, replace_json
from bulkrun.executors.slurm import QueuedJob
from bulkrun.job.store.workers import Worker, WorkerState
from bulkrun.launch.runs import control
from bulkrun.launch.runs.control import cancel_run, status_with_queue, statuses_with_queue
from tests.job.small_runs import enter, job


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


def test_a_run_that_nobody_works_on_while_its_array_is_in_the_queue_is_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = enter(tmp_path / "out", job(tmp_path / "out"))
    assert status_with_queue(run)[0].state == "interrupted"
    monkeypatch.setattr(control, "queued_jobs", lambda run: [QueuedJob("7_[0-3]", "PENDING", "", "Resources")])
    status, queue = status_with_queue(run)
    assert (status.state, status.message) == ("queued", "Slurm job 7_[0-3] is PENDING (Resources)")
    assert status.next_command == f"bulkrun status {run.root}" and len(queue) == 1


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
