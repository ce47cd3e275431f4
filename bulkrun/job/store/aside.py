"""Moving the whole directory of a run aside, which is refused while a worker is alive in it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from bulkrun.data.storage.durable import rename_dir
from bulkrun.errors import RunError
from bulkrun.job.store.events import log_event
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.workers import LifeWatch, Worker, WorkerState, read_workers


def move_aside(run: RunDir) -> Path | None:
    """Rename the whole directory of a run to a dated sibling; None when there is no run.

    A link to it stays: the new run goes where the old one was. Raises RunError when a worker is alive in it.
    """
    if not run.state.is_dir():
        return None
    refuse_live_workers(run)
    stamp = datetime.now().strftime("%Y-%m-%dT%H-%M-%S")
    root = run.root.resolve()
    aside = root.with_name(f"{root.name}.{stamp}.{secrets.token_hex(2)}")
    rename_dir(root, aside)
    log_event(RunDir(aside), "-", "moved_aside", moved_from=root.name)
    return aside


def move_back(run: RunDir, aside: Path) -> None:
    """Undo `move_aside`. Raises OSError where something else has the place: an empty directory is taken, no other."""
    rename_dir(aside, run.root.resolve())


def refuse_live_workers(
    run: RunDir,
    *,
    matters: Callable[[WorkerState], bool] = lambda _: True,
    life: LifeWatch | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Raise RunError when a worker of the run that `matters` is alive. Takes up to half a minute if one died on another
    host; who asks again, or asks more of it, passes the `life` that has watched since.
    """
    life = life or LifeWatch(run)
    here = Worker.this_process().place
    states = filter(matters, read_workers(run))
    first = {state.worker.id: state.counter for state in states if life.alive(state.worker)}
    while living := [state for state in read_workers(run) if state.worker.id in first and life.alive(state.worker)]:
        for state in living:
            if state.worker.place == here or state.counter != first[state.worker.id]:
                raise RunError(
                    f"{run.root}: a worker is running here (process {state.worker.pid}); "
                    "wait for it, or stop it with Ctrl+C or `kill`, then try again"
                )
        sleep(1.0)
