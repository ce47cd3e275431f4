"""Workers for which Ray has no place, and a Ray that is gone: said in our words. Ray is a stand-in."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bulkrun.errors import ExecutorError, RunError
from bulkrun.executors import head_watch, ray_cluster
from bulkrun.executors.ray_cluster import RayWorkers, WorkerHost
from bulkrun.job.jobfile.cluster import RaySpec
from bulkrun.job.store.run_dir import RunDir
from tests.waiting import wait_until


class Actor:
    """One whose calls come to nothing yet; a call is its own reference."""

    def __init__(self, asked: list[str]) -> None:
        self._asked = asked

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *_: self._asked.append(name) or name)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Ray with two nodes of 8 CPUs, and a third that died; all calls of `done` have ended, `asked` were made."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    nodes = [{"Resources": {"CPU": 8.0}, "Alive": True}] * 2 + [{"Resources": {"CPU": 99.0}, "Alive": False}]
    ray = SimpleNamespace(
        is_initialized=lambda: True,
        cluster_resources=lambda: {"CPU": 16.0},
        nodes=lambda: nodes,
        remote=lambda **_: lambda host: SimpleNamespace(remote=lambda *_: Actor(ray.asked)),
        get=lambda call: None,
        done=[],
        asked=[],
        kill=lambda actor: None,
        exceptions=SimpleNamespace(RayError=RuntimeError),
    )
    ray.wait = lambda calls, **_: ([c for c in calls if c in ray.done], [c for c in calls if c not in ray.done])
    monkeypatch.setitem(sys.modules, "ray", ray)
    return ray


def workers(folder: Path, said: list[str], **spec: Any) -> RayWorkers:
    return RayWorkers(RunDir(folder), lambda *_: [], 3, RaySpec(**spec), said.append)


def test_a_machine_that_is_too_small_is_said_at_once(ray: SimpleNamespace, tmp_path: Path) -> None:
    workers(tmp_path, [], cpus=8)
    with pytest.raises(ExecutorError, match=r"each asks for 16 CPUs \(a node has 8\).*lower ray\.cpus"):
        workers(tmp_path, [], cpus=16)
    with pytest.raises(ExecutorError, match=r"and 1 GPU \(a node has 0\)"):
        workers(tmp_path, [], gpus=1)


@pytest.mark.parametrize(
    ("resources", "asked", "gpus"), [({}, None, 0), ({"GPU": 4.0}, None, 1), ({"GPU": 4.0}, 0, 0), ({"GPU": 4.0}, 2, 2)]
)
def test_an_actor_has_what_was_asked_for_and_starts_again_for_ever_where_the_job_is(
    ray: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    resources: dict[str, float],
    asked: int | None,
    gpus: int,
) -> None:
    """Ray's own defaults are no restart and one call at a time, so that nobody could tell it to stop."""
    made: list[dict[str, Any]] = []
    hosts: list[tuple[Any, ...]] = []
    ray.cluster_resources = lambda: resources
    ray.remote = lambda **options: (
        made.append(options)
        or (lambda host: SimpleNamespace(remote=lambda *args: hosts.append(args) or Actor(ray.asked)))
    )
    monkeypatch.chdir(tmp_path)
    running = workers(Path("out"), [], address="auto", cpus=2, gpus=asked)
    again = {"max_restarts": -1, "max_task_retries": -1}
    assert made == [{"num_gpus": gpus, "num_cpus": 2, "max_concurrency": 2, **again}]
    assert [(run.root, folder) for run, _, folder in hosts] == [(tmp_path / "out", str(tmp_path))] * 3
    running.kill()


def test_workers_have_their_grace_and_a_little_more_to_say_how_that_went(ray: SimpleNamespace, tmp_path: Path) -> None:
    running, waited, wait = workers(tmp_path, [], address="auto"), [], ray.wait

    def noted(calls: list[str], *, num_returns: int, timeout: float) -> Any:
        waited.append((num_returns, timeout))
        return wait(calls)

    ray.wait = noted
    running.stop(grace_s=7.0)
    assert waited == [(3, 0), (3, 12.0)]
    assert running._head._ended.is_set(), "nobody is asked any more"


def test_nobody_works_once_every_worker_has_ended(ray: SimpleNamespace, tmp_path: Path) -> None:
    running = workers(tmp_path, [], address="auto")
    ray.done = ["work"]
    assert not running.tend()


def test_workers_that_wait_for_a_place_are_said_once_after_a_while(
    ray: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    assert workers(tmp_path, said, address="auto", cpus=16).tend() and said == []
    monkeypatch.setattr(ray_cluster, "_PLACED_AFTER_S", 0.0)
    waiting = workers(tmp_path, said, address="auto", cpus=16)
    assert waiting.tend() and waiting.tend()
    assert said == ["Ray has no room yet for 3 of 3 workers: each asks for 16 CPUs (a node has 8)"]


def test_nothing_is_said_once_all_have_a_place(
    ray: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "_PLACED_AFTER_S", 0.0)
    ray.done = ["is_placed"]
    said: list[str] = []
    assert workers(tmp_path, said, address="auto").tend() and said == []


@pytest.mark.parametrize(("done", "stopped"), [([], 3), (["work"], 0)])
def test_only_workers_that_work_are_told_to_stop(
    ray: SimpleNamespace, tmp_path: Path, done: list[str], stopped: int
) -> None:
    running = workers(tmp_path, [], address="auto")
    ray.done = done
    running.stop()
    assert ray.asked.count("stop") == stopped


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("The actor died unexpectedly.", "died unexpectedly; what is finished is saved; the same command continues"),
        ("The actor died in its creation task", "creation task; each node needs bulkrun itself"),
    ],
)
def test_a_worker_that_ray_gives_up_is_said_with_what_to_do(
    ray: SimpleNamespace, tmp_path: Path, words: str, said: str
) -> None:
    def lost(call: str) -> None:
        raise ray.exceptions.RayError(words)

    running = workers(tmp_path, [], address="auto")
    ray.done, ray.get = ["work"], lost
    with pytest.raises(ExecutorError, match=said):
        running.tend()


def test_a_stop_ends_every_actor_and_tells_what_kept_one_from_saving(ray: SimpleNamespace, tmp_path: Path) -> None:
    killed: list[object] = []

    def kill(actor: Actor) -> None:
        killed.append(actor)
        raise ray.exceptions.RayError("it has died")

    running = workers(tmp_path, [], address="auto")
    ray.kill, ray.get, ray.done = kill, lambda call: ("RunError", "the disk is full"), ["work"]
    assert [(type(error), str(error)) for error in running.stop()] == [(RunError, "the disk is full")] * 3
    assert len(killed) == 3


NEVER_SAVES = """
import pathlib, signal, sys
from bulkrun.errors import RunError
from bulkrun.executors.child_errors import ErrorChannel
channel = ErrorChannel()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(channel.tell(RunError("the disk is full"))))
pathlib.Path(sys.argv[1]).touch()
while True:
    signal.pause()
"""


def test_an_actor_tells_what_kept_its_worker_from_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "where the job is").mkdir()
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-c", NEVER_SAVES, "begun"]
    host = WorkerHost(RunDir(tmp_path / "out"), lambda *_: command, str(tmp_path / "where the job is"))

    def stop_once_begun() -> None:
        try:
            wait_until((tmp_path / "where the job is/begun").exists, "the worker")
        finally:
            host.stop()

    with ThreadPoolExecutor() as pool:
        stopping = pool.submit(stop_once_begun)
        assert host.work() == ("RunError", "the disk is full")
        stopping.result()


def test_workers_that_lost_their_place_are_said_too(
    ray: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "_PLACED_AFTER_S", 0.0)
    said: list[str] = []
    running = workers(tmp_path, said, address="auto")
    for done in (["is_placed"], [], [], ["is_placed"], []):  # a node that dies, comes back, dies
        ray.done = done
        assert running.tend()
    assert said == ["Ray has no room yet for 3 of 3 workers: each asks for 1 CPU (a node has 8)"] * 2


@pytest.mark.parametrize(("address", "named"), [("10.0.0.1:6379", "head at 10.0.0.1:6379"), (None, "of this machine")])
def test_a_head_that_is_gone_ends_the_run_before_ray_ends_the_process(
    ray: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str | None, named: str
) -> None:
    monkeypatch.setattr(head_watch, "_ASK_EVERY_S", 0.01)
    monkeypatch.setattr(head_watch, "_PATIENCE_S", 0.3)
    nodes, gone, revived = ray.nodes, threading.Event(), threading.Event()
    ray.nodes = lambda: (gone.is_set() and revived.wait()) or nodes()
    running = workers(tmp_path, [], address=address)
    until = time.monotonic() + 0.6
    while time.monotonic() < until:
        assert running.tend()
        time.sleep(0.01)
    gone.set()  # a question without an answer, for ever
    with pytest.raises(ExecutorError, match=f"the Ray {named} does not answer; what is finished is saved; the same"):
        while running.tend():
            time.sleep(0.01)
    revived.set()
    running._head.stop()


def test_a_process_that_was_stopped_for_a_while_does_not_blame_the_head(
    ray: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = workers(tmp_path, [], address="auto")
    now = time.monotonic() + 3600
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert running.tend()
    running._head.stop()
