"""One process's attempt at a run: whose directory, what was asked for, and under which id the process works."""

from __future__ import annotations

from dataclasses import dataclass

from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.store.events import Scalar, log_event
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import RunRecord
from bulkrun.job.store.workers import Worker


@dataclass(frozen=True)
class Attempt:
    """A worker in a run. `spec` is the resolved job of `record`."""

    run: RunDir
    record: RunRecord
    spec: JobSpec
    worker: Worker

    def log(self, event: str, **numbers: Scalar) -> None:
        """An event of this worker."""
        log_event(self.run, self.worker.id, event, **numbers)
