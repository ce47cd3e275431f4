"""Who is alive: judged by counters on one's own clock, by a goodbye, or by a process that is gone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bulkrun.data.storage.durable import replace_json
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.workers import (
    HEARTBEAT_S,
    LifeWatch,
    Worker,
    WorkerState,
    beats,
    read_worker,
    read_workers,
)

ELSEWHERE = Worker("w-far", "another machine", 1, "0")


class Clock:
    """Monotonic seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def beat(run: RunDir, worker: Worker, counter: int, ended: str | None = None) -> None:
    replace_json(run.workers / f"{worker.id}.json", asdict(WorkerState(worker, counter, "runner", ended)))


def test_a_worker_dies_when_its_counter_stands_still_for_the_ttl(run: RunDir) -> None:
    clock = Clock()
    life = LifeWatch(run, ttl_s=30, clock=clock)
    beat(run, ELSEWHERE, 1)
    assert life.alive(ELSEWHERE)
    clock.now += 29
    assert life.alive(ELSEWHERE)
    beat(run, ELSEWHERE, 2)
    clock.now += 29
    assert life.alive(ELSEWHERE)
    clock.now += 30
    assert not life.alive(ELSEWHERE)
    beat(run, ELSEWHERE, 3)
    assert life.alive(ELSEWHERE), "it was only slow"


def test_a_worker_without_a_file_gets_the_ttl_too(run: RunDir) -> None:
    clock = Clock()
    life = LifeWatch(run, ttl_s=30, clock=clock)
    assert life.alive(ELSEWHERE)
    clock.now += 31
    assert not life.alive(ELSEWHERE)


def test_a_goodbye_counts_at_once(run: RunDir) -> None:
    beat(run, ELSEWHERE, 5, ended="interrupted")
    assert not LifeWatch(run).alive(ELSEWHERE)


def test_a_process_that_is_gone_from_this_machine_counts_at_once(run: RunDir) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        started = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
        worker = replace(Worker.this_process(), id="child", pid=child.pid, started=started)
        beat(run, worker, 1)
        assert LifeWatch(run).alive(worker)
    finally:
        child.kill()
        child.wait()
    assert not LifeWatch(run).alive(worker)


def test_a_reused_pid_is_another_process(run: RunDir) -> None:
    worker = replace(Worker.this_process(), id="old", started="12345")
    beat(run, worker, 1)
    assert not LifeWatch(run).alive(worker)


def test_a_heartbeat_that_a_power_cut_emptied_is_no_heartbeat(run: RunDir) -> None:
    (run.workers / "w.json").write_bytes(b"")
    assert read_worker(run, "w") is None and read_workers(run) == []


def test_a_heartbeat_of_a_newer_version_is_one_whatever_else_it_says(run: RunDir) -> None:
    state = asdict(WorkerState(ELSEWHERE, 3, "runner"))
    state["worker"]["rack"] = 7
    replace_json(run.workers / "w-far.json", {**state, "colour": "red"})
    assert read_workers(run) == [WorkerState(ELSEWHERE, 3, "runner")]
    assert LifeWatch(run).alive(ELSEWHERE)


@pytest.mark.parametrize("document", [{}, {"id": "w-far"}, {"worker": {"id": "w-far"}}, {"worker": asdict(ELSEWHERE)}])
def test_what_is_no_heartbeat_says_nothing(run: RunDir, document: dict[str, object]) -> None:
    replace_json(run.workers / "w-far.json", document)
    assert read_workers(run) == []


@pytest.mark.parametrize("age_s", [10_800, -7_200])
def test_where_a_clock_is_off_the_counter_tells_who_beats(run: RunDir, age_s: float) -> None:
    here, slept = replace(Worker.this_process(), id="here"), list[float]()
    beat(run, here, 1)
    os.utime(run.worker_file("here"), (time.time() - age_s,) * 2)
    (state,) = read_workers(run)
    assert not beats(run, state, sleep=slept.append), "it is silent"
    assert HEARTBEAT_S < sum(slept) < 2 * HEARTBEAT_S
    assert beats(run, state, sleep=lambda _: beat(run, here, 2))


def test_only_where_a_clock_may_be_off_is_a_worker_looked_at_twice(run: RunDir) -> None:
    for worker, age_s, young in ((ELSEWHERE, 0, True), (ELSEWHERE, 99, False), (Worker.this_process("me"), 9, True)):
        beat(run, worker, 1)
        os.utime(run.worker_file(worker.id), (time.time() - age_s,) * 2)
        assert beats(run, WorkerState(worker, 1, "runner"), sleep=lambda _: pytest.fail("looked twice")) is young
