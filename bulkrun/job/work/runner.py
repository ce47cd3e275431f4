"""The job loop: keep the engine's queue full across shard borders, record what ends, stop and resume at any instant.

Supply, pipeline and monitor each know more of their matter than this module does. Knows no tokens' meaning, no files
and no signals.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from bulkrun.errors import BulkrunError, Interrupted, RunError
from bulkrun.job.store.replaced import OwnRun
from bulkrun.job.store.run_totals import RunTotals, read_totals
from bulkrun.job.store.workers import TTL_S, LifeWatch
from bulkrun.job.work.attempt import Attempt
from bulkrun.job.work.delivery import deliver
from bulkrun.job.work.engine_runner import EngineLost
from bulkrun.job.work.finish import finish_run
from bulkrun.job.work.monitor import Monitor
from bulkrun.job.work.pace import Pace
from bulkrun.job.work.pipeline import Pipeline
from bulkrun.job.work.progress import ProgressSnapshot
from bulkrun.job.work.supply import Supply
from bulkrun.job.work.uploads import Uploads

_IDLE_S = 0.05  # between looks when there is nothing to run


@dataclass(frozen=True)
class RunOutcome:
    """How a worker's part in a run ended. `totals` are those of `_SUCCESS`, None when interrupted."""

    state: Literal["completed", "completed_with_errors", "interrupted"]
    progress: ProgressSnapshot
    totals: RunTotals | None = None


class JobRunner:
    """Runs one worker of a run until the run is finished or `should_stop` says so.

    At the pipeline's deadline everything is saved and the worker ends; rows that could not finish before it are not
    begun.
    """

    def __init__(
        self,
        attempt: Attempt,
        pipeline: Pipeline,
        *,
        should_stop: Callable[[], bool],
        heartbeat_s: float,
        ttl_s: float = TTL_S,
    ) -> None:
        self._attempt, self._run, self._record = attempt, attempt.run, attempt.record
        self._pipeline, self._engine, self._should_stop = pipeline, pipeline.engine, should_stop
        self._supply = Supply(attempt, pipeline, LifeWatch(attempt.run, ttl_s=ttl_s))
        self._uploads = Uploads(attempt.run, attempt.record, attempt.worker.id)
        self._monitor = Monitor(attempt, pipeline, self._uploads, heartbeat_s=heartbeat_s)
        self._pace = Pace()

    def run(self) -> RunOutcome:
        """Work until the run is finished or interrupted. Finishing a finished run does nothing.

        Raises RunError (disk, damaged run, engine that cannot run) and ErrorRateExceeded; in each case everything that
        ended is journaled first.
        """
        if (totals := read_totals(self._run)) is not None:
            deliver(self._run, self._record, self._should_stop)
            return RunOutcome(totals.status, self._monitor.latest, totals)
        self._monitor.start()
        try:
            self._attempt.log("resumed" if self._run.holds_results else "started")
            outcome = self._work_unless_replaced()
        except EngineLost:  # as if it had been killed: its supervisor notes the death and what was in the engine
            with suppress(BulkrunError):
                self._attempt.log("engine_lost")
            raise
        except BaseException as error:
            self._monitor.end("failed", f"{type(error).__name__}: {error}" if isinstance(error, BulkrunError) else None)
            raise
        self._monitor.end(outcome.state, None)
        return outcome

    def _work_unless_replaced(self) -> RunOutcome:
        """If a file is missing because the whole run was moved aside, say so."""
        try:
            return self._work_and_save()
        except RunError:
            with suppress(OSError):
                OwnRun(self._run, self._record.run_id).check()
            raise

    def _work_and_save(self) -> RunOutcome:
        """The loop, with everything that ended and every partial output on disk however it ends."""
        self._pipeline.start()
        self._uploads.start()
        try:
            with suppress(Interrupted):  # while it loaded a model
                self._loop()
        finally:
            try:
                self._pipeline.close()
            finally:
                self._uploads.stop()
        self._monitor.look()
        if not self._pipeline.plan.finished:
            return RunOutcome("interrupted", self._monitor.latest)
        try:
            return self._finish()
        except Interrupted:
            return RunOutcome("interrupted", self._monitor.latest)

    def _finish(self) -> RunOutcome:
        """Mark the run finished; a bucket has all of its parts before that, and its `_SUCCESS` after."""
        deliver(self._run, self._record, self._should_stop)
        totals = finish_run(self._run, self._record)
        deliver(self._run, self._record, self._should_stop)
        return RunOutcome(totals.status, self._monitor.latest, totals)

    def _loop(self) -> None:
        while not self._should_stop() and not self._pipeline.deadline.over:
            self._look_around()
            self._top_up()
            if self._engine.in_flight:
                self._pipeline.step()
            elif self._engine.isolation.has_suspects:
                self._convict_suspects()
                time.sleep(_IDLE_S)
            elif self._pipeline.plan.finished or self._pipeline.deadline.left_some:
                return
            else:  # others are at work, or the planner, or the recorder
                time.sleep(_IDLE_S)

    def _look_around(self) -> None:
        """Do what is due beside the work. Raises what ended the recorder, and when there is no point in going on."""
        self._pipeline.recorder.check()
        if self._pace.is_due(busy=bool(self._engine.in_flight)):
            with self._pace.looking():
                self._monitor.look()
                self._supply.note_taken()
                self._monitor.check()
        self._pipeline.save_long_outputs()

    def _top_up(self) -> None:
        """Keep as many requests waiting as can run at once; suspects of a crash run alone."""
        isolation = self._engine.isolation
        if isolation.active and (self._engine.in_flight or self._pipeline.recorder.unjournaled()):
            return
        if suspects := isolation.next_group():
            self._pipeline.admit(suspects)
            return
        # The ordinary case: nobody is under suspicion.
        self._pipeline.admit(self._supply.next(self._engine.places))

    def _convict_suspects(self) -> None:
        """With nothing left to run, make rows that crashed the engine alone error rows."""
        if not self._engine.isolation.active:
            self._pipeline.record(self._engine.convicted())
