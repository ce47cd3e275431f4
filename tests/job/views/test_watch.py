"""Watching a run on which nobody computes yet, or any more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bulkrun.data.storage.durable import remove_tree
from bulkrun.job.store.heartbeat import Heartbeat
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.workers import Worker
from bulkrun.job.views.watch import watch_run
from tests.job.small_runs import enter, job, make_rows, start
from tests.job.store.test_workers import Clock


def looks(watching: Iterator[Any], clock: Clock, most: int, heartbeat: Heartbeat | None = None) -> int:
    """How many snapshots came, one a second, `most` at most."""
    for number in range(most):
        clock.now += 1.0
        if heartbeat is not None:
            heartbeat._beat()
        if next(watching, None) is None:
            return number
    return most


def test_it_waits_while_a_model_is_loading_and_ends_some_seconds_after_everybody(tmp_path: Path) -> None:
    run, _ = enter(tmp_path / "out", job(tmp_path / "out"))
    clock = Clock()
    assert looks(watch_run(run, clock), clock, 100) < 12
    heartbeat, watching = Heartbeat(run, Worker.this_process(), dict, role="supervisor"), watch_run(run, clock)
    heartbeat.start()
    assert looks(watching, clock, 200, heartbeat) == 200
    heartbeat.stop("failed")
    assert looks(watching, clock, 100) < 12


def test_the_night_under_way_in_a_finished_run_is_shown(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "out")
    start(run.root, make_rows(3), job(run.root))
    clock = Clock()
    enter(run.staged.root, job(run.staged.root))
    progress = {"rows_total": 9, "rows_done": 2}
    watching, heartbeat = watch_run(run, clock), Heartbeat(run.staged, Worker.this_process(), lambda: progress)
    heartbeat.start()
    assert next(watching).rows_done == 2
    heartbeat.stop("completed")
    remove_tree(run.staged.root)
    assert next(watching, None) is None
