"""One submit at a time: from its look into Slurm's queue until its array is there, others of the same run wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bulkrun.errors import ExecutorError, Interrupted
from bulkrun.executors.slurm_program import PATIENCE_S
from bulkrun.job.store.cancel import CancelWatch
from bulkrun.job.store.claims import Claims
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.workers import LifeWatch, Worker

_CLAIM = "submit"
_LOOK_EVERY_S = 0.5
_TURN_S = 2 * PATIENCE_S + 10.0  # longer than squeue and sbatch can take: who has it still died, on another host


@contextmanager
def turn_to_queue(run: RunDir, cancelled: CancelWatch, say: Callable[[str], None]) -> Iterator[None]:
    """Be the only one that puts this run into the queue while the body runs.

    Raises Interrupted for a run that is cancelled meanwhile, ExecutorError where it vanishes: Slurm refused it.
    """
    claims = Claims(run, Worker.this_process(), LifeWatch(run, ttl_s=_TURN_S))
    if not claims.take(_CLAIM):
        say("another submit is putting this run into the queue")
        _wait_until(lambda: claims.take(_CLAIM), run, cancelled)
    try:
        yield
    finally:
        claims.release(_CLAIM)


def _wait_until(is_ours: Callable[[], bool], run: RunDir, cancelled: CancelWatch) -> None:
    while run.run_json.exists():
        if is_ours():
            return
        if cancelled.now():
            raise Interrupted("stopped by bulkrun cancel before anything was put into the queue")
        time.sleep(_LOOK_EVERY_S)
    raise ExecutorError(f"{run.root}: the submit that began this run was refused, and says why")
