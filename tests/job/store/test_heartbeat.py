"""A worker's own heartbeat: it counts, says goodbye, and tells its worker when it cannot be written."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from bulkrun.errors import Interrupted, RunError
from bulkrun.job.store.heartbeat import Heartbeat, present
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.workers import Worker, read_worker, read_workers
from tests.waiting import wait_until


def test_the_heartbeat_counts_carries_numbers_and_says_goodbye(run: RunDir) -> None:
    worker = Worker.this_process()
    heartbeat = Heartbeat(run, worker, lambda: {"rows_done": 7}, interval_s=0.01)
    heartbeat.start()
    wait_until(lambda: (state := read_worker(run, worker.id)) and state.counter >= 3, "three beats", 10)
    state = read_worker(run, worker.id)
    assert state is not None and state.ended is None and state.progress == {"rows_done": 7}
    heartbeat.stop("failed", "why")
    last = read_workers(run)[0]
    assert (last.ended, last.message) == ("failed", "why")


def test_a_heartbeat_that_cannot_write_is_told_to_its_worker(run: RunDir) -> None:
    heartbeat = Heartbeat(run, Worker.this_process(), dict, interval_s=0.01)
    heartbeat.start()
    for path in [*run.workers.iterdir()]:
        path.unlink()
    run.workers.rmdir()
    run.workers.write_text("not a directory")
    deadline = time.monotonic() + 10
    with pytest.raises(RunError, match="writing failed"):
        while time.monotonic() < deadline:
            heartbeat.check()


def test_a_goodbye_that_cannot_be_written_is_said_by_taking_the_heartbeat_away(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, document: dict[str, object], *, sync: bool) -> None:
        raise RunError(f"{path}: writing failed: No space left on device")

    heartbeat = Heartbeat(run, Worker.this_process(), dict)
    heartbeat.start()
    monkeypatch.setattr("bulkrun.job.store.heartbeat.replace_json", full)
    heartbeat.stop("failed")
    assert read_workers(run) == [], "the process lives on, and would be taken for a worker"


def test_a_heartbeat_that_could_not_begin_can_be_stopped(run: RunDir) -> None:
    run.workers.rmdir()
    heartbeat = Heartbeat(run, Worker.this_process(), dict)
    with pytest.raises(RunError, match="writing failed"):
        heartbeat.start()
    heartbeat.stop("failed")


@pytest.mark.parametrize(
    "error, ended, message",
    [
        (None, "completed", None),
        (Interrupted("stopped by SIGTERM"), "interrupted", None),
        (KeyboardInterrupt(), "interrupted", None),
        (RunError("the disk is full"), "failed", "RunError: the disk is full"),
        (KeyError("shard"), "failed", "KeyError: 'shard'"),
    ],
)
def test_who_is_present_says_how_it_ended(
    run: RunDir, error: BaseException | None, ended: str, message: str | None
) -> None:
    with nullcontext() if error is None else pytest.raises(type(error)), present(run, Worker.this_process(), "helper"):
        assert read_workers(run)[0].ended is None
        if error is not None:
            raise error
    last = read_workers(run)[0]
    assert (last.role, last.ended, last.message) == ("helper", ended, message)
