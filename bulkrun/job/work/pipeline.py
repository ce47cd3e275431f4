"""What a generation passes in a worker: it comes from the plan, the engine runs it, the recorder journals its outcome.

The progress counts what happens on the way, and the deadline says what may still begin. Knows no claims: where the next
generations come from is the supply's matter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from bulkrun.job.outputs.output_text import Decode
from bulkrun.job.plan.plan_view import PlanView
from bulkrun.job.work.answers import Answer
from bulkrun.job.work.attempt import Attempt
from bulkrun.job.work.commit import RunIdentity
from bulkrun.job.work.deadline import Deadline
from bulkrun.job.work.engine_runner import EngineRunner
from bulkrun.job.work.flight import FlightLog
from bulkrun.job.work.progress import WorkerProgress
from bulkrun.job.work.recorder import Recorder
from bulkrun.job.work.shard_work import Generation
from bulkrun.request import Engine

_SAVE_PARTIALS_S = 60.0
_LONG_OUTPUT = 128  # tokens; a shorter output is cheaper to make again than to save every minute


class Pipeline:
    """One worker's. `rebuild_engine` makes a fresh engine with an adapter, after one failed or for that adapter's rows;
    `adapter` is that of `engine`, which took `load_s` to load. `deadline` is in monotonic seconds."""

    def __init__(
        self,
        attempt: Attempt,
        engine: Engine,
        decode: Decode,
        *,
        rebuild_engine: Callable[[str], Engine],
        deadline: float | None,
        adapter: str = "",
        load_s: float = 0.0,
    ) -> None:
        run, worker, spec = attempt.run, attempt.worker.id, attempt.spec
        self._log, self._next_partials = attempt.log, 0.0
        self.plan = PlanView(run)
        self.progress = WorkerProgress(
            self.plan, spec.sampled, max_model_len=engine.max_model_len, generates=spec.generates
        )
        self.deadline = Deadline(deadline)
        self.deadline.load_s = load_s
        identity = RunIdentity.of(attempt.record, spec)
        self.recorder = Recorder(run, identity, decode, worker, checkpoint_every=spec.run.checkpoint_every)
        flight = FlightLog(run, worker, self.recorder.unjournaled)
        self.engine = EngineRunner(engine, rebuild_engine, flight, self.deadline, self._engine_failed, adapter)

    def start(self) -> None:
        """Start the recorder; `close` ends it, and the flight log."""
        self.recorder.start()

    def admit(self, generations: Sequence[Generation]) -> None:
        """Queue generations of one adapter; those of another one than the engine's come when nothing is in it."""
        if generations and generations[0].adapter != self.engine.adapter:
            began = time.monotonic()
            self.engine.change_adapter(generations[0].adapter)
            self.deadline.load_s = time.monotonic() - began
            self._log("adapter_loaded", adapter=self.engine.adapter, load_s=round(self.deadline.load_s, 3))
        self.engine.admit(generations)

    def step(self) -> None:
        """One step of the engine, and what ended in it handed over to the recorder."""
        self.record(self.engine.step())
        self.progress.engine(self.engine.stats)

    def record(self, answers: list[Answer]) -> None:
        """Count and journal outcomes, whether the engine found them or they were known without it."""
        for answer in answers:
            self.progress.answered(answer.generation.shard, len(answer.generation.rows), answer.completion)
        if answers:
            self.recorder.record(answers)

    def save_long_outputs(self) -> None:
        """About once a minute: journal how far long outputs are."""
        now = time.monotonic()
        if now >= self._next_partials:
            self._next_partials = now + _SAVE_PARTIALS_S
            self.recorder.save_partials(self.engine.partials(at_least=_LONG_OUTPUT))

    def close(self) -> None:
        """Everything that ended, and every partial output, on disk. Raises what went wrong."""
        try:
            self.recorder.save_partials(self.engine.partials(at_least=1))
            self.recorder.close()
        finally:  # a full disk is no crash: no row is suspect
            self.engine.close()

    def _engine_failed(self, kind: str, in_flight: int) -> None:
        self._log("engine_failed", error=kind, in_flight=in_flight)
