"""Workers for which Ray has no place: refused on this machine, said of a cluster, which may grow. Ray is a stand-in."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bulkrun.errors import ExecutorError
from bulkrun.executors import ray_cluster
from bulkrun.executors.ray_cluster import RayWorkers
from bulkrun.job.jobfile.cluster import RaySpec
from bulkrun.job.store.run_dir import RunDir


class Actor:
    """One whose calls come to nothing yet; a call is its own reference."""

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *_: name)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Ray with two nodes of 8 CPUs, and a third that died; all calls of `done` have ended."""
    nodes = [{"Resources": {"CPU": 8.0}, "Alive": True}] * 2 + [{"Resources": {"CPU": 99.0}, "Alive": False}]
    ray = SimpleNamespace(
        is_initialized=lambda: True,
        cluster_resources=lambda: {"CPU": 16.0},
        nodes=lambda: nodes,
        remote=lambda **_: lambda host: SimpleNamespace(remote=lambda *_: Actor()),
        get=lambda call: None,
        done=[],
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
    with pytest.raises(ExecutorError, match=r"1 GPUs \(a node has 0\)"):
        workers(tmp_path, [], gpus=1)


def test_workers_that_wait_for_a_place_are_said_once_after_a_while(
    ray: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    assert workers(tmp_path, said, address="auto", cpus=16).tend() and said == []
    monkeypatch.setattr(ray_cluster, "_PLACED_AFTER_S", 0.0)
    waiting = workers(tmp_path, said, address="auto", cpus=16)
    assert waiting.tend() and waiting.tend()
    assert said == ["Ray has no place yet for 3 of 3 workers: each asks for 16 CPUs (a node has 8)"]


def test_nothing_is_said_once_all_have_a_place(
    ray: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "_PLACED_AFTER_S", 0.0)
    ray.done = ["is_placed"]
    said: list[str] = []
    assert workers(tmp_path, said, address="auto").tend() and said == []
