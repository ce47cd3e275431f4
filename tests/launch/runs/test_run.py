"""How the process that looks after workers ends: with the run, not with the last of its workers."""

from __future__ import annotations

import signal
import subprocess
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from bulkrun.data.storage.durable import replace_json
from bulkrun.errors import BulkrunError, Interrupted, RunError
from bulkrun.executors.allocation import Allocation
from bulkrun.job.store.cancel import CancelWatch, request_cancel
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import read_record
from bulkrun.job.store.workers import Worker, WorkerState
from bulkrun.job.work.delivery import is_delivered
from bulkrun.launch.processes.signals import DrainOnSignal
from bulkrun.launch.runs import run as module
from bulkrun.launch.runs.run import join, run_to_end
from tests.job.bucket_runs import bucket_job, start_bucket_run
from tests.job.small_runs import enter, job, make_rows, start
from tests.s3_server import Bucket


class NoView:
    def phase(self, text: str) -> None: ...

    def note(self, text: str) -> None: ...

    def update(self, snapshot: Any) -> None: ...


class Frozen:
    """A worker that never ends by itself."""

    def __init__(self) -> None:
        self.graces: list[float] = []

    def tend(self) -> bool:
        return True

    def stop(self, grace_s: float) -> list[BulkrunError]:
        self.graces.append(grace_s)
        return []

    def kill(self) -> None: ...


class Prepared:
    """All that `run_to_end` asks of a prepared job."""

    def __init__(self, run: RunDir, spec: Any) -> None:
        self.run, self.spec = run, spec


def test_a_finished_run_does_not_wait_for_a_worker_that_is_frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = job(tmp_path / "out")
    start(tmp_path / "out", make_rows(20), spec)
    run, record = enter(tmp_path / "out", spec)
    frozen = Frozen()
    monkeypatch.setattr(module, "_make_workers", lambda *_: frozen)
    monkeypatch.setattr(module, "_END_GRACE_S", 0.5)
    began = time.monotonic()
    done = run_to_end(Prepared(run, spec), record, NoView(), DrainOnSignal())  # type: ignore[arg-type]
    assert done.worked and done.totals.rows == 20
    assert 0.5 <= time.monotonic() - began < 5 and done.elapsed_s < 0.4, "the time until the run was finished"
    assert frozen.graces == [0.5]


def test_a_cancel_that_a_worker_hears_first_is_not_taken_for_a_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = job(tmp_path / "out")
    run, record = enter(tmp_path / "out", spec)

    class HearsFirst(Frozen):
        looks = 0

        def tend(self) -> bool:
            self.looks += 1
            if self.looks == 2:  # just after the supervisor has looked, which it does once a second
                request_cancel(run)
            return self.looks < 2

    monkeypatch.setattr(module, "_make_workers", lambda *_: HearsFirst())
    drain = DrainOnSignal()
    drain.cancel = CancelWatch(run)
    with pytest.raises(Interrupted, match="stopped by bulkrun cancel: 0 rows"):
        run_to_end(Prepared(run, spec), record, NoView(), drain)  # type: ignore[arg-type]


class Stopped(Frozen):
    """Workers that have ended."""

    def tend(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("received", "is_cancelled", "takes", "next_turn"),
    [
        (None, False, True, "Slurm starts it again"),
        ("SIGUSR1", False, True, "Slurm starts it again"),
        ("SIGUSR1", False, False, "run the same command again to continue"),
        ("SIGUSR1", True, True, None),
        ("SIGTERM", False, True, None),  # scancel
        ("SIGINT", False, True, None),
    ],
)
def test_slurm_is_asked_for_another_turn_where_time_ran_out_and_nobody_stopped_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    received: str | None,
    is_cancelled: bool,
    takes: bool,
    next_turn: str | None,
) -> None:
    run, record = enter(tmp_path / "out", spec := job(tmp_path / "out"))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_END_TIME", "4000000000")
    happened: list[str] = []
    monkeypatch.setattr(Allocation, "requeue", lambda job: happened.append(f"asked for {job.job_id}") or takes)
    view, drain = NoView(), DrainOnSignal()
    monkeypatch.setattr(view, "phase", happened.append)
    drain.cancel = CancelWatch(run)

    class StoppedBy(Frozen):
        def tend(self) -> bool:
            drain.received = received
            if is_cancelled:
                request_cancel(run)
            return False

    monkeypatch.setattr(module, "_make_workers", lambda *_: StoppedBy())
    with pytest.raises(Interrupted, match=next_turn or "run the same command again to continue"):
        run_to_end(Prepared(run, spec), record, view, drain)  # type: ignore[arg-type]
    told = [what for what in happened if " 7" in what]
    assert [what.rpartition(": ")[2] for what in told] == (
        ["asking Slurm to start job 7 again", "asked for 7"] if next_turn else []
    )


@pytest.mark.parametrize(
    ("received", "restarts", "end", "done", "error", "said"),
    [
        (None, "2", "4000000000", False, RunError, "stopped by its time limit in turn 3, and no row is done yet: the"),
        ("SIGUSR1", "7", "4000000000", False, RunError, "stopped by SIGUSR1 in turn 8, and no row is done yet"),
        (None, "1", "4000000000", False, Interrupted, "allow more, or every turn will end like this; then Slurm"),
        ("SIGUSR1", None, "4000000000", False, Interrupted, "allow more, or every turn will end like this; then Slurm"),
        (None, "2", "4000000000", True, Interrupted, "saved; Slurm starts it again"),
        (None, "2", "NONE", False, Interrupted, "saved; Slurm starts it again"),
        ("SIGTERM", "2", "4000000000", False, Interrupted, "saved; run the same command"),
    ],
)
def test_turns_of_slurm_that_end_before_a_row_is_done_do_not_go_on_for_ever(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    received: str | None,
    restarts: str | None,
    end: str,
    done: bool,
    error: type[Exception],
    said: str,
) -> None:
    run, record = enter(tmp_path / "out", spec := job(tmp_path / "out"))
    for name, value in {"JOB_ID": "7", "JOB_END_TIME": end, "RESTART_COUNT": restarts}.items():
        if value is not None:
            monkeypatch.setenv(f"SLURM_{name}", value)
    asked: list[str] = []
    monkeypatch.setattr(Allocation, "requeue", lambda job: asked.append(job.job_id) is None)
    monkeypatch.setattr(RunDir, "holds_results", done)
    drain = DrainOnSignal()

    class StoppedBy(Frozen):
        def tend(self) -> bool:
            drain.received = received
            return False

    monkeypatch.setattr(module, "_make_workers", lambda *_: StoppedBy())
    with pytest.raises(error, match=said) as raised:
        run_to_end(Prepared(run, spec), record, NoView(), drain)  # type: ignore[arg-type]
    assert type(raised.value) is error
    assert asked == (["7"] if "Slurm" in said else [])


def test_what_workers_that_had_to_be_ended_did_not_bring_to_the_bucket_is_brought(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_bucket_run(tmp_path / "s", bucket.url("out"))
    run, whole = RunDir(tmp_path / "s"), bucket.list()
    run.delivered.unlink()
    bucket.files.rm_file(f"{bucket.name}/out/_SUCCESS")
    monkeypatch.setattr(module, "_make_workers", lambda *_: Stopped())
    spec = bucket_job(bucket.url("out"), run.root)
    run_to_end(Prepared(run, spec), read_record(run), NoView(), DrainOnSignal())  # type: ignore[arg-type]
    assert bucket.list() == whole


def test_what_an_attempt_that_failed_left_goes_before_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk each attempt would eat a little of what is freed."""
    run, record = enter(tmp_path / "out", spec := job(tmp_path / "out"))
    dead = WorkerState(replace(Worker.this_process("dead"), started="before"), 3, "runner")
    replace_json(run.worker_file("dead"), asdict(dead))
    monkeypatch.setattr(module, "_make_workers", lambda *_: Stopped())
    with pytest.raises(Interrupted):
        run_to_end(Prepared(run, spec), record, NoView(), DrainOnSignal())  # type: ignore[arg-type]
    assert not run.worker_file("dead").exists()


def test_a_planner_does_not_go_on_without_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a program that goes on, as a notebook does."""
    run, record = enter(tmp_path / "out", spec := job(tmp_path / "out"))
    monkeypatch.setattr(module, "_make_workers", lambda *_: Stopped())
    with subprocess.Popen(["sleep", "60"], stdout=subprocess.PIPE, text=True) as child:
        monkeypatch.setattr("bulkrun.launch.processes.planner.subprocess.Popen", lambda *_, **__: child)
        with pytest.raises(Interrupted):
            run_to_end(Prepared(run, spec), record, NoView(), DrainOnSignal())  # type: ignore[arg-type]
        ended = child.returncode
        child.kill()
    assert ended == -signal.SIGTERM


def test_a_worker_that_could_not_save_is_no_run_that_was_stopped_and_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unsaved(Stopped):
        def stop(self, grace_s: float) -> list[BulkrunError]:
            return [RunError("the disk is full")]

    run, record = enter(tmp_path / "out", spec := job(tmp_path / "out"))
    monkeypatch.setattr(module, "_make_workers", lambda *_: Unsaved())
    with pytest.raises(RunError, match="the disk is full"):
        run_to_end(Prepared(run, spec), record, NoView(), DrainOnSignal())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("walltime", "end", "why"),
    [
        (None, None, "a signal to its workers: 0 rows are done and saved; run the same command again"),
        (60.0, None, "its time limit: 0 rows are done and saved; run.walltime, 60 s, leaves no time"),
        (None, "4000000000", "its time limit: 0 rows are done and saved; the allocation's time leaves no time"),
    ],
)
def test_workers_that_end_early_had_a_time_limit_only_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, walltime: float | None, end: str | None, why: str
) -> None:
    spec = job(tmp_path / "out", run={"walltime": walltime})
    run, record = enter(tmp_path / "out", spec)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if end is not None:
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setenv("SLURM_JOB_END_TIME", end)
        monkeypatch.setattr("bulkrun.executors.allocation._say", lambda *_: None)

    monkeypatch.setattr(module, "_make_workers", lambda *_: Stopped())
    with pytest.raises(Interrupted, match=f"stopped by {why}"):
        run_to_end(Prepared(run, spec), record, NoView(), DrainOnSignal())  # type: ignore[arg-type]


@pytest.mark.parametrize("is_known", [True, False])
def test_a_worker_that_comes_after_the_end_brings_what_the_bucket_lacks(
    bucket: Bucket, tmp_path: Path, is_known: bool
) -> None:
    start_bucket_run(tmp_path / "s", bucket.url("out"))
    run = RunDir(tmp_path / "s")
    if is_known:
        run.delivered.unlink()  # as a kill right after the last upload leaves it
    bucket.files.rm_file(f"{bucket.name}/out/_SUCCESS")
    assert not join(run.root, None, NoView()).worked
    assert is_delivered(run) and "out/_SUCCESS" in bucket.list()


@pytest.mark.parametrize(
    ("device", "asked", "gpus"), [("auto", None, None), ("cpu", None, 0), ("cpu", 1, 1), ("auto", 2, 2)]
)
def test_a_job_on_cpus_takes_no_gpu_of_a_ray_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, asked: int | None, gpus: int | None
) -> None:
    """Its workers would wait for one after another's GPU."""
    made: list[Any] = []
    monkeypatch.setattr(module, "RayWorkers", lambda run, command, count, spec, say: made.append((count, spec)))
    keys = {"run": {"executor": "ray", "workers": 3}, "engine": {"device": device}, "ray": {"gpus": asked, "cpus": 2}}
    module._make_workers(job(tmp_path / "out").with_keys(**keys), RunDir(tmp_path / "out"), "r", NoView())
    ((count, spec),) = made
    assert (count, spec.gpus, spec.cpus) == (3, gpus, 2)
