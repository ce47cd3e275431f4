"""What a worker does about once a second beside its work: see what was committed, say how far it is, look around.

Knows what others see of a worker (heartbeat, events, uploads) and when there is no point in going on; admits
nothing, and records only how far long outputs are.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress

from bulkrun.data.results.parts import read_part_info
from bulkrun.errors import BulkrunError
from bulkrun.job.plan.plan_view import PlanView
from bulkrun.job.store.events import log_event
from bulkrun.job.store.replaced import OwnRun
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import RunRecord
from bulkrun.job.store.workers import Heartbeat, Worker
from bulkrun.job.work.engine_runner import EngineRunner
from bulkrun.job.work.error_rate import ErrorRate
from bulkrun.job.work.progress import ProgressSnapshot, WorkerProgress
from bulkrun.job.work.recorder import Recorder
from bulkrun.job.work.supply import Supply
from bulkrun.job.work.uploads import Uploads

_PAUSE = 20  # times as long as it took, within bounds
_BUSY_PAUSE_S = (1.0, 60.0)
_WAITING_PAUSE_S = (0.0, 5.0)  # of a worker that waits for what others, or its own recorder, do
_SAVE_PARTIALS_S = 60.0
_LONG_OUTPUT = 128  # tokens; a shorter output is cheaper to make again than to save every minute


class Housekeeping:
    """One worker's housekeeping. `latest` is its progress as of the last look, which the heartbeat publishes."""

    def __init__(
        self,
        run: RunDir,
        record: RunRecord,
        worker: Worker,
        plan: PlanView,
        recorder: Recorder,
        engine: EngineRunner,
        progress: WorkerProgress,
        supply: Supply,
        *,
        max_error_rate: float,
        heartbeat_s: float,
    ) -> None:
        self._run, self._worker, self._plan = run, worker, plan
        self._own_run = OwnRun(run, record.run_id)
        self._recorder, self._engine, self._progress, self._supply = recorder, engine, progress, supply
        self.latest = ProgressSnapshot()
        self.uploads = Uploads(run, record, worker.id)
        self._heartbeat = Heartbeat(run, worker, lambda: self.latest.to_json(), interval_s=heartbeat_s)
        self._error_rate = ErrorRate(run, record, max_error_rate)
        self._counted: set[int] = set()  # committed shards that the progress knows of
        self._kept, self._keeping_took = -math.inf, 0.0
        self._next_partials = 0.0

    def start(self) -> None:
        """Let others see this worker."""
        self._heartbeat.start()

    def keep(self) -> None:
        """Do what is due now. Raises what ended the recorder, and when there is no point in going on."""
        self._recorder.check()
        now = time.monotonic()
        # Thousands of parts, or a slow network disk: looking must not take the engine's time, nor the recorder's.
        shortest, longest = _BUSY_PAUSE_S if self._engine.in_flight else _WAITING_PAUSE_S
        if now >= self._kept + min(max(shortest, _PAUSE * self._keeping_took), longest):
            self.look()
            self._supply.note_taken()
            self._check()
            self._kept, self._keeping_took = now, time.monotonic() - now
        if now >= self._next_partials:
            self._next_partials = now + _SAVE_PARTIALS_S
            self._recorder.save_partials(self._engine.partials(at_least=_LONG_OUTPUT))

    def look(self) -> None:
        """See what was committed, here and by others, and publish the progress."""
        self._plan.refresh()
        for done in self._recorder.take_recorded():
            self._error_rate.ran(done.rows, failed=done.failed)
            if done.late:
                self._progress.spoiled(done.shard, done.rows)
        for shard, info in self._recorder.take_committed():
            self.uploads.add(self._run.part(shard, info.folder))
            self.log("committed", shard=shard, rows=info.rows, errors=info.error_rows)
        for shard in self._plan.committed - self._counted:
            self._counted.add(shard)
            self._engine.drop(shard)
            self._progress.committed(shard, read_part_info(self._run.part(shard)))
        self.latest = self._progress.snapshot(self._engine.tokens_in_flight)

    def _check(self) -> None:
        """Raise when there is no point in going on: disk, another run in this place, or too many errors so far."""
        self._heartbeat.check()
        self._own_run.check()
        if not self.latest.all_done:
            self._error_rate.check(self._plan.planned)

    def end(self, ended: str, message: str | None) -> None:
        """Say goodbye. A failure to write it is ignored: the error that stopped the run matters more."""
        with suppress(BulkrunError):
            self._heartbeat.stop(ended, message)
            stats = self._engine.stats
            computed = {
                "computed_prompt_tokens": stats.num_prompt_tokens,
                "computed_output_tokens": stats.num_output_tokens,
            }
            self.log(ended, rows=self.latest.rows_done, **computed)

    def log(self, event: str, **numbers: str | int | float | bool | None) -> None:
        """An event of this worker."""
        log_event(self._run, self._worker.id, event, **numbers)
