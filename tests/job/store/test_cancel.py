"""A request to stop reaches the workers it names, and no later ones."""

from __future__ import annotations

from pathlib import Path

from bulkrun.job.store.cancel import CancelWatch, request_cancel
from bulkrun.job.store.run_dir import RunDir
from tests.job.store.test_workers import Clock


def test_only_the_workers_that_lived_are_asked_to_stop(tmp_path: Path) -> None:
    run, clock = RunDir(tmp_path), Clock()
    run.state.mkdir()
    old, other, late = (CancelWatch(run, name, clock) for name in ("a", "b", "c"))
    assert not old() and not other()
    request_cancel(run, ["a"])
    request_cancel(run, ["b"])
    assert not old(), "it looks once a second"
    clock.now += 1.0
    assert old() and other() and not late()
    run.cancelled.unlink()
    assert old(), "a worker that stops goes on stopping"
