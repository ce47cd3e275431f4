"""The engine: requests in, completions out, one forward pass per step.

Wires the scheduler (which sequences, how many tokens), the model runner (tensors) and the endings (when to stop)
together. Speaks token ids; knows no text, files, rows or jobs. Implements `bulkrun.request.Engine`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from pathlib import Path
from typing import Any

from bulkrun.engine.config import EngineConfig
from bulkrun.engine.counters import EngineCounters
from bulkrun.engine.loading import ready_model
from bulkrun.engine.out_of_memory import MemoryGuard, make_model_runner
from bulkrun.engine.recovery import discard, start_over
from bulkrun.engine.scheduling.block_manager import BlockManager
from bulkrun.engine.scheduling.deadlines import Deadlines
from bulkrun.engine.scheduling.finishing import (
    NOT_NUMBERS,
    Ending,
    append_forced_tokens,
    append_given_tokens,
    append_token,
    completion_of,
    grammar_failure,
    timeout_of,
)
from bulkrun.engine.scheduling.refusals import without_output
from bulkrun.engine.scheduling.scheduled_batch import ScheduledBatch
from bulkrun.engine.scheduling.scheduler import Scheduler
from bulkrun.engine.scheduling.sequence import Sequence
from bulkrun.engine.scheduling.sequence_factory import SequenceFactory
from bulkrun.engine.step.pending_step import PendingStep, StepOutput
from bulkrun.engine.step_launcher import StepLauncher
from bulkrun.models.language_model import LanguageModel
from bulkrun.request import (
    Completion,
    EngineStats,
    PartialOutput,
    Request,
    RowError,
    StopMatcherFactory,
    TokenConstraintFactory,
)
from bulkrun.settings import Batching, EngineArgs

_WINDOW_PAUSE_S = 0.001  # while a batch waits to be full (`engine.batching: dynamic`) and nothing runs


class LLMEngine:
    """Continuous batching over a paged KV cache. Not thread-safe: one caller adds and steps."""

    def __init__(
        self,
        model: LanguageModel,
        config: EngineConfig,
        *,
        eos_token_ids: Iterable[int] = (),
        stop_matcher_factory: StopMatcherFactory | None = None,
        constraint_factory: TokenConstraintFactory | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model_runner, config = make_model_runner(model, config)
        self.config = config
        self.scheduler = Scheduler(
            BlockManager(config.num_blocks, config.block_size),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
            policy=config.batching_policy(clock),
            num_kept_states=config.num_kept_states,
        )
        self._sequences = SequenceFactory(
            vocab_size=model.config.vocab_size,
            max_model_len=config.max_model_len,
            eos_token_ids=eos_token_ids,
            stop_matcher_factory=stop_matcher_factory,
            constraint_factory=constraint_factory,
            clock=clock,
        )
        self._vocab_size = model.config.vocab_size
        self._clock = clock
        self._deadlines = Deadlines(clock)
        self._ended: list[Completion] = []  # not returned yet
        self._under_way: PendingStep | None = None  # launched, its tokens not seen yet
        self._mid_update: list[Sequence] = []  # in the middle of an update; re-queued if interrupted
        self._memory = MemoryGuard(model.config, config)
        self._launcher = StepLauncher(self.model_runner, self._memory, self._vocab_size)
        self._counters = EngineCounters()

    @classmethod
    def from_model_dir(
        cls,
        path: Path | str,
        *,
        stop_matcher_factory: StopMatcherFactory | None = None,
        constraint_factory: TokenConstraintFactory | None = None,
        more_eos_token_ids: Iterable[int] = (),
        clock: Callable[[], float] = time.monotonic,
        **settings: Any,
    ) -> LLMEngine:
        """Load a Hugging Face model directory; `settings` are those of `EngineArgs`. Raises what `ready_model` does.

        `more_eos_token_ids` end an output as those do that the model's own files name.
        """
        ready = ready_model(path, EngineArgs(**settings))
        return cls(
            ready.model,
            ready.config,
            eos_token_ids={*ready.eos_token_ids, *more_eos_token_ids},
            stop_matcher_factory=stop_matcher_factory,
            constraint_factory=constraint_factory,
            clock=clock,
        )

    @property
    def max_model_len(self) -> int:
        """Most tokens (prompt + output) one sequence may have."""
        return self.config.max_model_len

    @property
    def max_num_seqs(self) -> int:
        """Most sequences that run at once."""
        return self.config.max_num_seqs

    def change_batching(self, batching: Batching) -> None:
        """Go on with another policy; weights, cache and counters stay. Between two runs only."""
        assert not self.has_unfinished(), "a policy is changed between two runs"
        self.config = replace(self.config, batching=batching)
        self.scheduler.policy = self.config.batching_policy(self._clock)

    def add_request(self, request: Request) -> None:
        """Queue a request. One that cannot be served ends as an error completion of the next step.

        Tokens in `request.output_token_ids` count as generated and generation goes on after them, except where
        log-probabilities are wanted: those of the earlier tokens are not there, so it starts over.
        """
        self._add(request, shares_prefix=self.config.enable_prefix_caching)

    def _add(self, request: Request, *, shares_prefix: bool) -> None:
        seq = self._sequences.make(request)
        if isinstance(seq, RowError):
            self._ended.append(without_output(request, seq))
            return
        seq.shares_prefix = shares_prefix
        if seq.constraint is not None:
            self._launcher.expect_constraints()
        ending = append_given_tokens(seq) or self._append_forced(seq)
        if ending is None:
            self.scheduler.add(seq)
        else:
            self._ended.append(completion_of(seq, ending))

    def step(self) -> list[Completion]:
        """Launch one forward pass and return the requests that are known to have ended (any order).

        (1) Sequences whose time is over leave. (2) The scheduler says who computes how many tokens. (3) That step is
        launched. (4) The step before lands: its tokens are appended, and who ended leaves. (5) Where memory ran out,
        sizes shrink. (6) Without asynchronous scheduling the new step lands at once. With it, it lands in the next
        call, so that the device never waits for the host; what a sequence computes beyond its end is thrown away.

        When it raises, Ctrl-C included, no request is lost: those that had not ended are computed anew.
        """
        try:
            self._step()
        except BaseException:
            self._start_over()
            raise
        completions, self._ended = self._ended, []
        return completions

    def _step(self) -> None:
        self._time_out()
        batch = self.scheduler.schedule()
        launched = self._launch(batch) if batch.seqs else None
        if not batch.seqs and self._under_way is None and self.scheduler.num_waiting:
            time.sleep(_WINDOW_PAUSE_S)
        self._land()
        if self._memory.shortage is not None:
            self._shrink()
        self._under_way = launched
        if not self.config.async_scheduling:
            self._land()

    def has_unfinished(self) -> bool:
        """Whether any added request has not been returned by `step` yet."""
        return bool(self._ended or self.scheduler.running or self.scheduler.num_waiting)

    def abort(self, request_ids: SequenceOf[str]) -> None:
        """Drop requests without a completion."""
        ids = set(request_ids)
        self._deadlines.forget(self.scheduler.abort(ids))
        self._ended = [completion for completion in self._ended if completion.request_id not in ids]

    def partial_outputs(self) -> list[PartialOutput]:
        """Output so far of every request that has some and has not ended."""
        scheduler = self.scheduler
        unfinished = [*scheduler.running, *scheduler.waiting]
        return [PartialOutput(s.request.request_id, s.output_token_ids) for s in unfinished if s.num_output_tokens]

    def stats(self) -> EngineStats:
        """Counters and levels, cheap enough for every step."""
        return self._counters.stats(self.scheduler)

    def _launch(self, batch: ScheduledBatch) -> PendingStep | None:
        self._deadlines.start(batch.new_seqs)
        launched = self._launcher.launch(batch, self._land)
        if launched is not None:
            self._counters.count(batch)
        return launched

    def _shrink(self) -> None:
        """Go on with smaller sizes: whoever runs waits again with the tokens it has, and its KV is computed anew.

        The step before has landed, so nobody's tokens are on their way any more.
        """
        while self._memory.shortage is not None:
            self.config = config = self._memory.smaller(self.config)
            self.scheduler.restart(BlockManager(config.num_blocks, config.block_size), config.max_num_batched_tokens)
            self._memory.attempt(lambda: self.model_runner.restart(self.config))

    def _land(self) -> None:
        """Wait for the step under way, if there is one, and take in what it brought."""
        landed, self._under_way = self._under_way, None
        if landed is not None:
            self._take_in(landed.result())

    def _time_out(self) -> None:
        """Remove the sequences whose time is over, wherever they are."""
        if expired := self._deadlines.expired():
            self._ended += [completion_of(seq, timeout_of(seq)) for seq in expired]
            self.scheduler.drop(expired)
            self._deadlines.forget(expired)

    def _take_in(self, output: StepOutput) -> None:
        """Append the step's tokens and take out what ended with them."""
        ended: list[Sequence] = []
        broken: list[Sequence] = []
        for index, seq in enumerate(output.seqs):
            if seq.has_ended or index in output.overtaken:
                continue
            if not output.is_valid[index]:
                broken.append(seq)
                continue
            self._mid_update = [seq]
            ending = self._advance(seq, output, index)
            if ending is not None:
                self._ended.append(completion_of(seq, ending))
                ended.append(seq)
            self._mid_update = []
        if ended:
            self.scheduler.finish(ended)
        if broken:
            self._discard(broken)
        self._deadlines.forget([*ended, *broken])

    def _advance(self, seq: Sequence, output: StepOutput, index: int) -> Ending | None:
        """Give one sequence what the step has for it, and say whether it ends with that."""
        if index in output.grammar_errors:
            return grammar_failure(output.grammar_errors[index])
        logprob = output.logprobs[index]
        if seq.logprobs is not None and logprob is not None:
            seq.logprobs.append(logprob)
        self._counters.num_output_tokens += 1
        ending = append_token(seq, output.token_ids[index])
        return ending or self._append_forced(seq, self.config.block_size - 1)  # a step brings a block at most

    def _append_forced(self, seq: Sequence, limit: int | None = None) -> Ending | None:
        """Give one sequence the tokens that need no step, and say whether it ends with that."""
        num_known = len(seq.token_ids)
        ending = append_forced_tokens(seq, self._vocab_size, limit)
        self._counters.count_forced(len(seq.token_ids) - num_known)
        return ending

    def _discard(self, broken: list[Sequence]) -> None:
        """Remove sequences whose KV is not finite; those that may have read another's KV are computed again, alone."""
        self._mid_update = broken
        discard(broken, self.scheduler, self.model_runner)
        for seq in broken:
            if seq.reads_prefix:
                self._add(replace(seq.request, output_token_ids=seq.output_token_ids), shares_prefix=False)
            else:
                self._ended.append(completion_of(seq, NOT_NUMBERS))
        self._mid_update = []

    def _start_over(self) -> None:
        """Clean up after a step that was interrupted."""
        self._under_way = None
        self._launcher.wait_for_masks()
        start_over(self.scheduler, self.model_runner, {completion.request_id for completion in self._ended})
        self.abort([seq.request.request_id for seq in self._mid_update])
        for seq in self._mid_update:
            self._add(seq.request, shares_prefix=seq.shares_prefix)
        self._mid_update = []
        self._deadlines.keep_only(self.scheduler.waiting)
