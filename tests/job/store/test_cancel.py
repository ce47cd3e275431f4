"""A request to stop reaches everybody who entered the run before it, and nobody later."""

from __future__ import annotations

from pathlib import Path

from bulkrun.job.store.cancel import CancelWatch, request_cancel
from bulkrun.job.store.run_dir import RunDir
from tests.job.store.test_workers import Clock


def test_a_request_reaches_who_came_before_it_and_nobody_later(tmp_path: Path) -> None:
    run, clock = RunDir(tmp_path), Clock()
    run.state.mkdir()
    request_cancel(run)
    old, other = (CancelWatch(run, clock) for _ in range(2))
    assert not old() and not other(), "the request of before is not for them"
    request_cancel(run)
    late = CancelWatch(run, clock)
    assert not old(), "it looks once a second"
    clock.now += 1.0
    assert old() and other() and not late()
    run.cancelled.unlink()
    clock.now += 1.0
    assert old(), "a worker that stops goes on stopping"
    assert not late.now(), "a run that was moved aside took its request along"


def test_a_watch_may_come_before_the_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "out")
    watch = CancelWatch(run)
    run.state.mkdir(parents=True)
    assert not watch.now()
    request_cancel(run)
    assert watch.now()


def test_who_works_on_what_is_staged_hears_of_it_too(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.state.mkdir()
    watch = CancelWatch(run.staged)
    request_cancel(run)
    assert watch.now()
