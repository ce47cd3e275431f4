"""A command that works on a run: a signal or `bulkrun cancel` stops it, and what was cancelled stays stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bulkrun.errors import Interrupted
from bulkrun.executors.allocation import current_allocation
from bulkrun.job.store.cancel import CancelWatch
from bulkrun.job.store.run_dir import RunDir
from bulkrun.launch.processes.signals import DrainOnSignal, drain_on_signal


@contextmanager
def stoppable(run: RunDir, say: Callable[[str], None]) -> Iterator[DrainOnSignal]:
    """`drain_on_signal`, whose `cancel` is one of `run` from now on. Raises Interrupted.

    A cancelled command ends the Slurm job that it is in where its exit code would start that again.
    """
    with drain_on_signal() as drain:
        drain.cancel = CancelWatch(run)
        try:
            yield drain
        except Interrupted:
            if drain.cancelled() and (allocation := current_allocation()) is not None and allocation.comes_back():
                # Said first: the cluster ends at once what it takes back.
                say(f"stopped by bulkrun cancel: Slurm job {allocation.job_id} is taken out of the queue")
                allocation.end()
            raise
