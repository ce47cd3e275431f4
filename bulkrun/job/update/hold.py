"""One writer at a time: who changes a finished run holds its `update` claim, and says so with a heartbeat.

Knows nothing of what is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bulkrun.errors import RunError
from bulkrun.job.store.aside import refuse_live_workers
from bulkrun.job.store.claims import Claims
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.workers import Heartbeat, LifeWatch, Worker

_CLAIM = "update"


@contextmanager
def hold(run: RunDir) -> Iterator[Worker]:
    """Be the only one that changes this run. Raises RunError, naming the process, when a worker or another
    changer is alive in it; takes up to half a minute where one died on another host."""
    refuse_live_workers(run)
    worker = Worker.this_process()
    heartbeat = Heartbeat(run, worker, dict, role="updater")
    heartbeat.start()
    ended = "failed"
    try:
        if not Claims(run, worker, LifeWatch(run)).take(_CLAIM):
            raise RunError(
                f"{run.root}: another process began to change this run just now; wait for it, then try again"
            )
        yield worker
        ended = "completed"
    finally:
        heartbeat.stop(ended)
        _release(run, worker)


def _release(run: RunDir, worker: Worker) -> None:
    """A dead worker's claim is taken over with the next number: what has ended leaves no claim behind."""
    for path in run.claims.glob(f"{_CLAIM}.*"):
        if worker.id in path.read_text():
            path.unlink(missing_ok=True)
