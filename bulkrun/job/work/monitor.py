"""A worker's view of the run and the run's view of the worker: what was committed, how far it is, whether to go on.

Knows what others see of a worker (heartbeat, events) and when there is no point in going on; admits and records
nothing.
"""

from __future__ import annotations

from contextlib import suppress

from bulkrun.data.results.parts import read_part_info
from bulkrun.errors import BulkrunError
from bulkrun.job.store.heartbeat import Heartbeat
from bulkrun.job.store.replaced import OwnRun
from bulkrun.job.work.attempt import Attempt
from bulkrun.job.work.error_rate import ErrorRate
from bulkrun.job.work.pipeline import Pipeline
from bulkrun.job.work.uploads import Uploads


class Monitor:
    """One worker's monitor. `latest` is its progress as of the last look, which the heartbeat publishes."""

    def __init__(self, attempt: Attempt, pipeline: Pipeline, uploads: Uploads, *, heartbeat_s: float) -> None:
        self._attempt, self._pipeline, self._uploads = attempt, pipeline, uploads
        self._own_run = OwnRun(attempt.run, attempt.record.run_id)
        self.latest = pipeline.progress.snapshot()  # of no row yet: it says whether there will be outputs
        self._heartbeat = Heartbeat(attempt.run, attempt.worker, lambda: self.latest.to_json(), interval_s=heartbeat_s)
        self._error_rate = ErrorRate(attempt.run, attempt.record, attempt.spec.run.max_error_rate)
        self._counted: set[int] = set()  # committed shards that the progress knows of

    def start(self) -> None:
        """Let others see this worker."""
        self._heartbeat.start()

    def look(self) -> None:
        """See what was committed, here and by others, and publish the progress."""
        run, pipeline = self._attempt.run, self._pipeline
        pipeline.plan.refresh()
        for done in pipeline.recorder.take_recorded():
            self._error_rate.ran(done.rows, failed=done.failed)
            if done.late:
                pipeline.progress.spoiled(done.shard, done.rows)
        for shard, info in pipeline.recorder.take_committed():
            self._uploads.add(run.part(shard, info.folder))
            self._attempt.log("committed", shard=shard, rows=info.rows, errors=info.error_rows)
        for shard in pipeline.plan.committed - self._counted:
            self._counted.add(shard)
            pipeline.engine.drop(shard)
            pipeline.progress.committed(shard, read_part_info(run.part(shard)))
        self.latest = pipeline.progress.snapshot(pipeline.engine.tokens_in_flight)

    def check(self) -> None:
        """Raise when there is no point in going on: disk, another run in this place, or too many errors so far."""
        self._heartbeat.check()
        self._own_run.check()
        if not self.latest.all_done:
            self._error_rate.check(self._pipeline.plan.planned)

    def end(self, ended: str, message: str | None) -> None:
        """Say goodbye. A failure to write it is ignored: the error that stopped the run matters more."""
        with suppress(BulkrunError):
            self._heartbeat.stop(ended, message)
            stats = self._pipeline.engine.stats
            computed = {
                "computed_prompt_tokens": stats.num_prompt_tokens,
                "computed_output_tokens": stats.num_output_tokens,
            }
            self._attempt.log(ended, rows=self.latest.rows_done, **computed)
