"""How the process that looks after workers ends: with the run, not with the last of its workers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from bulkrun.errors import BulkrunError, Interrupted
from bulkrun.job.store.cancel import CancelWatch, request_cancel
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.work.delivery import is_delivered
from bulkrun.launch.processes.signals import DrainOnSignal
from bulkrun.launch.runs import run as module
from bulkrun.launch.runs.run import join, run_to_end
from tests.job.bucket_runs import start_bucket_run
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

    class Stopped(Frozen):
        def tend(self) -> bool:
            return False

    monkeypatch.setattr(module, "_make_workers", lambda *_: Stopped())
    with pytest.raises(Interrupted, match=f"stopped by {why}"):
        run_to_end(Prepared(run, spec), record, NoView(), DrainOnSignal())  # type: ignore[arg-type]


def test_a_worker_that_comes_after_the_end_brings_what_the_bucket_lacks(bucket: Bucket, tmp_path: Path) -> None:
    start_bucket_run(tmp_path / "s", bucket.url("out"))
    run = RunDir(tmp_path / "s")
    run.delivered.unlink()  # as a kill right after the last upload leaves it
    bucket.files.rm_file(f"{bucket.name}/out/_SUCCESS")
    assert not join(run.root, None, NoView()).worked
    assert is_delivered(run) and "out/_SUCCESS" in bucket.list()
