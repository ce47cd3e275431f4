"""A worker is frozen when its heartbeat stands still while this process looks on."""

from __future__ import annotations

from pathlib import Path

from bulkrun.executors.frozen import FrozenWatch
from bulkrun.job.store.heartbeat import Heartbeat
from bulkrun.job.store.workers import Worker
from tests.job.small_runs import enter, job


class Scene:
    """A worker whose heartbeat is moved by hand, and a clock."""

    def __init__(self, path: Path) -> None:
        self.run, _ = enter(path, job(path))
        self.now = 0.0
        self.watch = FrozenWatch(self.run, silent_s=100.0, clock=lambda: self.now)
        self.heartbeat = Heartbeat(self.run, Worker.this_process("w"), dict)

    def frozen_after(self, *, seconds: int, step: int) -> bool:
        """Whether it was taken for frozen at any look in so many seconds."""
        found = False
        for _ in range(0, seconds, step):
            self.now += step
            found = self.watch.is_frozen("w") or found
        return found


def test_a_worker_without_a_heartbeat_is_starting(tmp_path: Path) -> None:
    assert not Scene(tmp_path / "out").frozen_after(seconds=1000, step=7)


def test_one_that_stands_still_is_frozen_and_one_that_moves_is_not(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "out")
    for _ in range(20):
        scene.heartbeat._beat()
        assert not scene.frozen_after(seconds=90, step=7)
    assert scene.frozen_after(seconds=28, step=7)


def test_time_in_which_nobody_looked_does_not_count(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "out")
    scene.heartbeat._beat()
    assert not scene.frozen_after(seconds=30, step=5)
    scene.now += 10_000
    assert not scene.watch.is_frozen("w")
    assert not scene.frozen_after(seconds=80, step=5)
