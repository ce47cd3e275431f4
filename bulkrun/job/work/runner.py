"""The job loop: keep the engine's queue full across shard borders, record what ends, stop and resume at any instant.

Wires feed, engine, recorder, isolation and progress together; each of them knows more of its matter than this
module does. Knows no tokens' meaning, no files and no signals.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from bulkrun.errors import BulkrunError, Interrupted, RunError
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.plan.plan_view import PlanView
from bulkrun.job.store.claims import Claims
from bulkrun.job.store.replaced import check_not_replaced
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import RunRecord
from bulkrun.job.store.workers import HEARTBEAT_S, TTL_S, LifeWatch, Worker
from bulkrun.job.work.answers import Answer
from bulkrun.job.work.commit import RunIdentity
from bulkrun.job.work.deadline import Deadline
from bulkrun.job.work.delivery import deliver
from bulkrun.job.work.engine_runner import EngineLost, EngineRunner, engine_error
from bulkrun.job.work.feed import Feed
from bulkrun.job.work.finish import RunTotals, finish_run, read_totals
from bulkrun.job.work.flight import FlightLog, Key, SetAside, key_of, set_aside, suspicion
from bulkrun.job.work.housekeeping import Housekeeping
from bulkrun.job.work.logprobs import Decode
from bulkrun.job.work.progress import ProgressSnapshot, WorkerProgress
from bulkrun.job.work.recorder import Recorder
from bulkrun.job.work.shard_work import Generation, ShardWork, open_shard
from bulkrun.job.work.tail import Tail
from bulkrun.request import Engine

_HOUSEKEEPING_PAUSE = 20  # times as long as it took, within bounds
_BUSY_PAUSE_S = (1.0, 60.0)
_WAITING_PAUSE_S = (0.0, 5.0)  # of a worker that waits for what others, or its own recorder, do
_HELP_EVERY_S = 1.0
_IDLE_S = 0.05  # between looks when there is nothing to run
_SAVE_PARTIALS_S = 60.0
_LONG_OUTPUT = 128  # tokens; a shorter output is cheaper to make again than to save every minute


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
        worker: Worker | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        deadline: float | None = None,
        ttl_s: float = TTL_S,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._run, self._record, self._spec, self._should_stop = run, record, spec, should_stop
        self._worker = worker or Worker.this_process()
        self._plan = PlanView(run)
        self._life = LifeWatch(run, ttl_s=ttl_s)
        self._feed = Feed(self._plan, Claims(run, self._worker, self._life))
        self._recorder = Recorder(
            run, RunIdentity.of(record, spec), decode, self._worker.id, checkpoint_every=spec.run.checkpoint_every
        )
        self._progress = WorkerProgress(self._plan, spec.sampling)
        self._deadline = Deadline(deadline)
        flight = FlightLog(run, self._worker.id, self._recorder.unjournaled)
        self._engine = EngineRunner(engine, rebuild_engine, flight, self._deadline, self._engine_failed)
        self._house = Housekeeping(
            run,
            record,
            self._worker,
            self._plan,
            self._recorder,
            self._engine,
            self._progress,
            max_error_rate=spec.run.max_error_rate,
            heartbeat_s=heartbeat_s,
        )
        self._tail = Tail(run, self._worker.id, self._life, self._read_shard)
        self._elsewhere: set[Key] = set()  # generations of this worker's shards that others have taken
        self._housekept, self._housekeeping_took = -math.inf, 0.0
        self._next_partials = self._next_help = 0.0

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
                check_not_replaced(self._run, self._record.run_id)
            raise

    def _work_and_save(self) -> RunOutcome:
        """The loop, with everything that ended and every partial output on disk however it ends."""
        self._recorder.start()
        self._house.uploads.start()
        try:
            self._loop()
        finally:
            self._recorder.save_partials(self._engine.partials(at_least=1))
            self._recorder.close()
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
            self._keep_house()
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
        generations = self._take(places)
        if not generations and len(self._engine.in_flight) < self._engine.max_num_seqs:
            generations = self._help(places)
        self._engine.admit(generations)

    def _take(self, places: int) -> list[Generation]:
        """The next generations of this worker's shards; none after one with suspects was opened, which run first."""
        taken: list[Generation] = []
        while len(taken) < places and not self._engine.isolation.active:
            if (generation := self._feed.next()) is None:
                if (shard := self._feed.claim()) is None:
                    break
                self._open_shard(shard)
            elif key_of(generation) not in self._elsewhere and self._fits(generation):
                taken.append(generation)
        return taken

    def _help(self, places: int) -> list[Generation]:
        """Nothing is left to claim: what others will not get to for a while, about once a second."""
        now = time.monotonic()
        if now < self._next_help or self._engine.isolation.undecided or not self._recorder.idle:
            return []
        self._next_help = now + _HELP_EVERY_S
        found = self._tail.look(self._plan.open_shards, set(map(key_of, self._engine.in_flight.values())), places)
        if found is None:
            return []
        if found.whole:
            self._recorder.commit(found.shard)
            return []
        self._feed.leave(found.shard)
        self._recorder.help(found.shard, found.refused)
        self._progress.helps(found.shard)
        if found.aside is not None:
            self._reclaim_from_dead(found.shard, found.aside)
        return [generation for generation in found.generations if self._fits(generation)]

    def _fits(self, generation: Generation) -> bool:
        """Whether it can finish before this worker's end; if not, the next start finds it as it is."""
        tokens = min(generation.request.sampling.max_tokens, self._progress.mean_output)
        return self._deadline.fits(tokens - len(generation.request.output_token_ids))

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

    def _read_shard(self, shard: int) -> ShardWork:
        return open_shard(self._run, shard, self._spec.sampling, self._spec.run.row_timeout)

    def _open_shard(self, shard: int) -> None:
        work = self._read_shard(shard)
        rows = self._plan.shards[shard].rows * self._spec.sampling.generations
        self._progress.opened(shard, already_done=rows - work.outstanding, refused=len(work.refused))
        for journal, lines in work.damaged.items():
            self._house.log("journal_damaged", journal=journal, lines=len(lines))
        self._recorder.open(work)
        aside = set_aside(work, suspicion(self._run, shard, self._life))
        self._reclaim_from_dead(shard, aside)
        self._feed.give(aside.work)

    def _reclaim_from_dead(self, shard: int, aside: SetAside) -> None:
        """Run what was in the engine of a dead process alone, or not at all if it is known to be the cause."""
        self._engine.isolation.suspect(aside.groups)
        answers = [engine_error(generation, "died", how) for generation, how in aside.convicted]
        if answers:
            self._house.log("rows_convicted", shard=shard, rows=len(answers))
            self._record_answers(answers)

    def _keep_house(self) -> None:
        self._recorder.check()
        now = time.monotonic()
        # Thousands of parts, or a slow network disk: looking must not take the engine's time, nor the recorder's.
        shortest, longest = _BUSY_PAUSE_S if self._engine.in_flight else _WAITING_PAUSE_S
        if now >= self._housekept + min(max(shortest, _HOUSEKEEPING_PAUSE * self._housekeeping_took), longest):
            self._house.look()
            self._elsewhere |= self._tail.elsewhere(self._feed.shard)
            self._house.check()
            self._housekept, self._housekeeping_took = now, time.monotonic() - now
        if now >= self._next_partials:
            self._next_partials = now + _SAVE_PARTIALS_S
            self._recorder.save_partials(self._engine.partials(at_least=_LONG_OUTPUT))
