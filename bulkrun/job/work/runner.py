"""The job loop: keep the engine's queue full across shard borders, record what ends, stop and resume at any instant.

Wires supply, engine, recorder, isolation and progress together; each of them knows more of its matter than this
module does. Knows no tokens' meaning, no files and no signals.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from bulkrun.errors import BulkrunError, Interrupted, RunError
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.plan.plan_view import PlanView
from bulkrun.job.store.replaced import OwnRun
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import RunRecord
from bulkrun.job.store.workers import TTL_S, LifeWatch, Worker
from bulkrun.job.work.answers import Answer
from bulkrun.job.work.commit import RunIdentity
from bulkrun.job.work.deadline import Deadline
from bulkrun.job.work.delivery import deliver
from bulkrun.job.work.engine_runner import EngineLost, EngineRunner
from bulkrun.job.work.finish import RunTotals, finish_run, read_totals
from bulkrun.job.work.flight import FlightLog
from bulkrun.job.work.housekeeping import Housekeeping
from bulkrun.job.work.logprobs import Decode
from bulkrun.job.work.progress import ProgressSnapshot, WorkerProgress
from bulkrun.job.work.recorder import Recorder
from bulkrun.job.work.supply import Supply
from bulkrun.request import Engine

_IDLE_S = 0.05  # between looks when there is nothing to run


@dataclass(frozen=True)
class RunOutcome:
    """How a worker's part in a run ended. `totals` are those of `_SUCCESS`, None when interrupted."""

    state: Literal["completed", "completed_with_errors", "interrupted"]
    progress: ProgressSnapshot
    totals: RunTotals | None = None


class JobRunner:
    """Runs one worker of a run until the run is finished or `should_stop` says so.

    `spec` is the resolved job. `rebuild_engine` makes a fresh engine after one failed. At `deadline` (monotonic
    seconds) everything is saved and the worker ends; rows that could not finish before it are not begun.
    """

    def __init__(
        self,
        run: RunDir,
        record: RunRecord,
        spec: JobSpec,
        engine: Engine,
        decode: Decode,
        *,
        rebuild_engine: Callable[[], Engine],
        worker: Worker,
        should_stop: Callable[[], bool],
        deadline: float | None,
        heartbeat_s: float,
        ttl_s: float = TTL_S,
    ) -> None:
        self._run, self._record, self._should_stop = run, record, should_stop
        self._plan = PlanView(run)
        identity = RunIdentity.of(record, spec)
        self._recorder = Recorder(run, identity, decode, worker.id, checkpoint_every=spec.run.checkpoint_every)
        self._progress = WorkerProgress(self._plan, spec.sampling)
        self._deadline = Deadline(deadline)
        flight = FlightLog(run, worker.id, self._recorder.unjournaled)
        self._engine = EngineRunner(engine, rebuild_engine, flight, self._deadline, self._engine_failed)
        self._supply = Supply(
            run,
            spec,
            worker,
            LifeWatch(run, ttl_s=ttl_s),
            self._plan,
            self._recorder,
            self._engine,
            self._progress,
            self._deadline,
            self._record_answers,
        )
        self._house = Housekeeping(
            run,
            record,
            worker,
            self._plan,
            self._recorder,
            self._engine,
            self._progress,
            self._supply,
            max_error_rate=spec.run.max_error_rate,
            heartbeat_s=heartbeat_s,
        )

    def run(self) -> RunOutcome:
        """Work until the run is finished or interrupted. Finishing a finished run does nothing.

        Raises RunError (disk, damaged run, engine that cannot run) and ErrorRateExceeded; in each case everything that
        ended is journaled first.
        """
        if (totals := read_totals(self._run)) is not None:
            deliver(self._run, self._record, self._should_stop)
            return RunOutcome(totals.status, self._house.latest, totals)
        self._house.start()
        try:
            self._house.log("resumed" if self._run.holds_results else "started")
            outcome = self._work_unless_replaced()
        except EngineLost:  # as if it had been killed: its supervisor notes the death and what was in the engine
            with suppress(BulkrunError):
                self._house.log("engine_lost")
            raise
        except BaseException as error:
            self._house.end("failed", f"{type(error).__name__}: {error}" if isinstance(error, BulkrunError) else None)
            raise
        self._house.end(outcome.state, None)
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
        self._recorder.start()
        self._house.uploads.start()
        try:
            self._loop()
        finally:
            try:
                self._recorder.save_partials(self._engine.partials(at_least=1))
                self._recorder.close()
            finally:  # a full disk is no crash: no row is suspect
                self._engine.close()
                self._house.uploads.stop()
        self._house.look()
        if not self._plan.finished:
            return RunOutcome("interrupted", self._house.latest)
        try:
            return self._finish()
        except Interrupted:
            return RunOutcome("interrupted", self._house.latest)

    def _finish(self) -> RunOutcome:
        """Mark the run finished; a bucket has all of its parts before that, and its `_SUCCESS` after."""
        deliver(self._run, self._record, self._should_stop)
        totals = finish_run(self._run, self._record)
        deliver(self._run, self._record, self._should_stop)
        return RunOutcome(totals.status, self._house.latest, totals)

    def _loop(self) -> None:
        while not self._should_stop() and not self._deadline.over:
            self._house.keep()
            self._top_up()
            if self._engine.in_flight:
                self._step()
            elif self._engine.isolation.has_suspects:
                self._convict_suspects()
                time.sleep(_IDLE_S)
            elif self._plan.finished or self._deadline.left_some:
                return
            else:  # others are at work, or the planner, or the recorder
                time.sleep(_IDLE_S)

    def _top_up(self) -> None:
        """Keep as many requests waiting as can run at once; suspects of a crash run alone."""
        isolation = self._engine.isolation
        if isolation.active and (self._engine.in_flight or self._recorder.unjournaled()):
            return
        if suspects := isolation.next_group():
            self._engine.admit(suspects)
            return
        # The ordinary case: nobody is under suspicion.
        places = 2 * self._engine.max_num_seqs - len(self._engine.in_flight)
        self._engine.admit(self._supply.next(places))

    def _engine_failed(self, kind: str, in_flight: int) -> None:
        self._house.log("engine_failed", error=kind, in_flight=in_flight)
        self._progress.engine_replaced()

    def _step(self) -> None:
        self._record_answers(self._engine.step())
        self._progress.engine(self._engine.stats)

    def _convict_suspects(self) -> None:
        """With nothing left to run, make rows that crashed the engine alone error rows."""
        if not self._engine.isolation.active:
            self._record_answers(self._engine.convicted())

    def _record_answers(self, answers: list[Answer]) -> None:
        for answer in answers:
            self._progress.answered(answer.generation.shard, len(answer.generation.rows), answer.completion)
        if answers:
            self._recorder.record(answers)
