"""How far a run is, as numbers: counters, rates over the last minute, and the time left by tokens, not rows.

Pure: fed with events and a clock, asked for a snapshot. A snapshot is what a worker's heartbeat file carries, so any
terminal can show it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from bulkrun.data.results.parts import PartInfo
from bulkrun.job.plan.plan_view import PlanView
from bulkrun.request import Completion, EngineStats

if TYPE_CHECKING:
    from bulkrun.job.jobfile.sampling import SamplingSpec

WINDOW_S = 60.0
_SAMPLE_EVERY_S = 0.5
_PRIOR_OUTPUTS = 16  # how many observed outputs weigh as much as the guess made before any were seen


@dataclass(frozen=True)
class ProgressSnapshot:
    """One worker's view. Rows are output rows (input rows x samples); tokens are counts, rates are per second.

    `rows_total` and `remaining_tokens` cover what is planned so far; `eta_s` is None until there is a rate. The numbers
    that end in `_open` are the share of this worker's open shards; the rest is committed, by whomever.
    """

    rows_total: int = 0
    rows_done: int = 0
    error_rows: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    rows_done_open: int = 0
    error_rows_open: int = 0
    prompt_tokens_open: int = 0
    completion_tokens_open: int = 0
    num_generations: int = 0  # that ended in this worker
    remaining_tokens: int = 0
    rows_per_s: float = 0.0
    prompt_tokens_per_s: float = 0.0
    completion_tokens_per_s: float = 0.0
    kv_cache_usage: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    elapsed_s: float = 0.0
    eta_s: float | None = None
    plan_complete: bool = False
    generates: bool = True  # else there are no output tokens, and no KV cache

    @property
    def all_done(self) -> bool:
        """Whether every row has ended, committed or not."""
        return self.plan_complete and self.rows_done >= self.rows_total

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Tally:
    """Output rows, how many of them hold an error, and tokens."""

    rows: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.rows + other.rows,
            self.errors + other.errors,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
        )


@dataclass(frozen=True)
class _Sample:
    """What this worker had computed by a given time."""

    time: float
    rows: int
    prompt_tokens: int
    completion_tokens: int


class WorkerProgress:
    """Counters of one worker, of a job with this `sampling`. Used by one thread."""

    def __init__(
        self,
        plan: PlanView,
        sampling: SamplingSpec,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_model_len: int,
        generates: bool = True,
    ) -> None:
        self._plan, self._clock, self._generates = plan, clock, generates
        self._samples, self._outputs = sampling.n, sampling.generations  # rows of an input row, and what they are of
        self._expected_output = min(sampling.to_params().max_tokens, max_model_len)  # before any ended
        self._began = clock()
        self._committed = Tally()
        self._open: dict[int, Tally] = {}  # of shards that this worker has open
        self._generations = 0  # ended in this attempt; each counts once, however many rows it answers
        self._computed = Tally()
        self._stats = EngineStats()
        self._window: deque[_Sample] = deque([_Sample(self._began, 0, 0, 0)])

    def opened(self, shard: int, already_done: int, refused: int = 0) -> None:
        """A shard was opened: outputs that earlier attempts had done, and those of rows that the plan refused."""
        self._open[shard] = Tally(rows=already_done + refused, errors=refused)

    def helps(self, shard: int) -> None:
        """This worker does part of a shard that another one has open and counts."""
        self._open.setdefault(shard, Tally())

    def answered(self, shard: int, rows: int, done: Completion) -> None:
        """A generation ended that answers `rows` rows."""
        errors = rows if done.error is not None else 0
        prompt_tokens, completion_tokens = done.num_prompt_tokens, done.num_output_tokens
        if shard in self._open:  # else another worker committed the shard, and the part's footer counts
            self._open[shard] += Tally(rows, errors, rows * prompt_tokens, rows * completion_tokens)
        self._computed += Tally(rows, errors, prompt_tokens, completion_tokens)
        self._generations += 1

    def spoiled(self, shard: int, rows: int) -> None:
        """An output that ended well turned out to be no answer when it was read."""
        if shard in self._open:
            self._open[shard] += Tally(errors=rows)

    def committed(self, shard: int, info: PartInfo) -> None:
        """A part is there, made by whomever: its footer replaces what was counted of the shard here."""
        self._open.pop(shard, None)
        self._committed += Tally(info.rows, info.error_rows, info.prompt_tokens, info.completion_tokens)

    def engine(self, stats: EngineStats) -> None:
        """Levels of the engine after a step, and what this worker's engines have counted since it began."""
        self._stats = stats
        now = self._clock()
        if now - self._window[-1].time >= _SAMPLE_EVERY_S:
            prompt_tokens = stats.num_prompt_tokens + stats.num_cached_tokens
            self._window.append(_Sample(now, self._computed.rows, prompt_tokens, stats.num_output_tokens))
        while len(self._window) > 2 and now - self._window[1].time >= WINDOW_S:
            self._window.popleft()

    def snapshot(self, tokens_in_flight: int = 0) -> ProgressSnapshot:
        """The numbers now. `tokens_in_flight`: output tokens so far of the generations in the engine."""
        open_rows = sum(self._open.values(), Tally())
        open_rows = replace(open_rows, rows=self._kept(open_rows.rows), errors=self._kept(open_rows.errors))
        done = self._committed + open_rows
        rows_per_s, prompt_rate, completion_rate = self._rates()
        remaining, rate = max(0, self._tokens_left() - tokens_in_flight), prompt_rate + completion_rate
        return ProgressSnapshot(
            rows_total=self._samples * sum(info.rows for info in self._plan.shards.values()),
            rows_done=done.rows,
            error_rows=done.errors,
            prompt_tokens=done.prompt_tokens,
            completion_tokens=done.completion_tokens,
            rows_done_open=open_rows.rows,
            error_rows_open=open_rows.errors,
            prompt_tokens_open=open_rows.prompt_tokens,
            completion_tokens_open=open_rows.completion_tokens,
            num_generations=self._generations,
            remaining_tokens=remaining,
            rows_per_s=rows_per_s,
            prompt_tokens_per_s=prompt_rate,
            completion_tokens_per_s=completion_rate,
            kv_cache_usage=self._stats.kv_cache_usage,
            num_running=self._stats.num_running,
            num_waiting=self._stats.num_waiting,
            elapsed_s=self._clock() - self._began,
            eta_s=remaining / rate if rate > 0 else None,
            plan_complete=self._plan.complete is not None,
            generates=self._generates,
        )

    @property
    def mean_output(self) -> float:
        """Tokens of an output, by those seen so far and the guess made before."""
        ended = self._generations + _PRIOR_OUTPUTS
        return (self._computed.completion_tokens + _PRIOR_OUTPUTS * self._expected_output) / ended

    def _kept(self, outputs: int) -> int:
        """The output rows that so many outputs come to: of `best_of` a row keeps `samples`."""
        return outputs * self._samples // self._outputs

    def _rates(self) -> tuple[float, float, float]:
        """Rows, prompt tokens and output tokens per second over the window."""
        first, last = self._window[0], self._window[-1]
        seconds = last.time - first.time
        if seconds <= 0:
            return 0.0, 0.0, 0.0
        return (
            (last.rows - first.rows) * self._samples / self._outputs / seconds,
            (last.prompt_tokens - first.prompt_tokens) / seconds,
            (last.completion_tokens - first.completion_tokens) / seconds,
        )

    def _tokens_left(self) -> int:
        """Tokens of the outputs that have not ended and of their prompts, by the mean output length seen so far."""
        left, mean_output = 0.0, self.mean_output
        for shard, info in self._plan.shards.items():
            if shard not in self._plan.committed:
                rows = info.rows * self._outputs
                done = self._open[shard].rows if shard in self._open else 0
                tokens = info.prompt_tokens * self._outputs + rows * mean_output
                left += tokens * (1 - done / max(rows, 1))
        return int(left)
