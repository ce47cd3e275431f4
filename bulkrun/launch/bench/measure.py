"""An engine over a workload, with a clock beside it. Knows requests and time; knows no policies and no ceilings."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from bulkrun.errors import UsageError
from bulkrun.launch.bench.workload import Work
from bulkrun.request import Engine, Request, SamplingParams

if TYPE_CHECKING:
    from tqdm import tqdm

_WARM_UP_REQUESTS, _WARM_UP_TOKENS = 64, 4


@dataclass(slots=True)
class Measured:
    """One run. Seats are counted per step: `num_busy` had a sequence that computed something, `num_held` could not take
    another one. `num_positions`: tokens computed, of prompts and outputs.
    """

    wall_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    widths: list[tuple[float, int]] = field(default_factory=list)  # when a step was done with, sequences in its batch
    num_busy: int = 0
    num_held: int = 0
    num_positions: int = 0
    input_tokens: int = 0
    output_tokens: int = 0

    def latency_s(self, share: float) -> float:
        """The least latency that at least this share (0 to 1) of the requests did not exceed: the nearest rank."""
        rank = math.ceil(share * len(self.latencies_s))
        return sorted(self.latencies_s)[max(rank, 1) - 1]


def run_workload(
    engine: Engine,
    work: Sequence[Work],
    arrivals_s: Sequence[float] | None = None,
    *,
    holds_seats: bool = False,
    what: str = "measuring",
) -> Measured:
    """Every request greedily to its full length, end-of-sequence ignored; each is added when it arrives (default: all
    at once, in order). `holds_seats`: an ended sequence keeps its seat until its whole batch has ended. `what` stands
    beside the bar that a terminal shows.
    """
    check_lengths(work, engine.max_model_len)
    with bar(what, len(work), "request") as shown:
        return _run(engine, work, arrivals_s, holds_seats, shown)


def bar(what: str, total: int, of: str) -> tqdm[NoReturn]:
    """Counts on stderr what has ended, where that is a terminal, and is gone once it is closed."""
    from tqdm import tqdm

    return tqdm(desc=what, total=total, unit=f" {of}s", disable=None, leave=False, dynamic_ncols=True)


def _run(
    engine: Engine, work: Sequence[Work], arrivals_s: Sequence[float] | None, holds_seats: bool, shown: tqdm[NoReturn]
) -> Measured:
    measured = Measured(input_tokens=sum(len(one.prompt_token_ids) for one in work))
    arrivals = list(arrivals_s or [0.0] * len(work))
    todo, seats = deque(range(len(work))), _Seats(engine, holds_seats)
    start = time.perf_counter()
    while todo or engine.has_unfinished():
        now = time.perf_counter() - start
        while todo and arrivals[todo[0]] <= now:
            number = todo.popleft()
            engine.add_request(_request(number, work[number]))
        if not engine.has_unfinished():
            time.sleep(arrivals[todo[0]] - now)
            continue
        ended = engine.step()
        now = time.perf_counter() - start
        seats.count(measured, now)
        for completion in ended:
            assert completion.error is None, f"request {completion.request_id}: {completion.error}"
            measured.latencies_s.append(now - arrivals[int(completion.request_id)])
            measured.output_tokens += completion.num_output_tokens
        shown.update(len(ended))
    measured.wall_s = time.perf_counter() - start
    return measured


def warm_up(engine: Engine, work: Sequence[Work]) -> None:
    """Compile kernels and touch memory by running some similar requests, with other tokens and short outputs."""
    short = [
        Work(one.prompt_token_ids[::-1], min(one.num_output_tokens, _WARM_UP_TOKENS))
        for one in work[:_WARM_UP_REQUESTS]
    ]
    run_workload(engine, short, what="warming up")


def check_lengths(work: Sequence[Work], max_model_len: int) -> None:
    """Raises UsageError where a request would be cut short: the tokens counted must be those computed."""
    for number, one in enumerate(work):
        check_length(len(one.prompt_token_ids), one.num_output_tokens, max_model_len, f"request {number}: ")


def check_length(
    num_input: int, num_output: int, max_model_len: int, place: str = "", fix: str = "give shorter lengths"
) -> None:
    """Raises UsageError for a request of so many tokens that would be cut short."""
    if num_input + num_output > max_model_len:
        raise UsageError(
            f"{place}{num_input} + {num_output} tokens are above max_model_len {max_model_len}; {fix}, "
            "or a higher --max-model-len where the model has more positions"
        )


def _request(number: int, one: Work) -> Request:
    params = SamplingParams(max_tokens=one.num_output_tokens, temperature=0.0, ignore_eos=True)
    return Request(str(number), one.prompt_token_ids, params, seed=number)


class _Seats:
    """Who sits where, batch by batch, from the engine's counters of what it launched.

    With asynchronous scheduling sequences end a step after the one that computed their last token, so that who runs
    now says nothing of the batch that was launched.
    """

    def __init__(self, engine: Engine, holds_seats: bool) -> None:
        self._engine, self._holds_seats = engine, holds_seats
        self._before = engine.stats()
        self._num_taken = 0  # seats of the batch that holds them

    def count(self, measured: Measured, now: float) -> None:
        """Add the batch that the last step launched, if it did. To be called after every step."""
        before, after = self._before, self._engine.stats()
        self._before = after
        if after.num_steps == before.num_steps:
            return
        if before.num_running == 0:  # as the policies have it, this is where a batch begins
            self._num_taken = 0
        self._num_taken += after.num_admitted - before.num_admitted
        width = after.num_scheduled_seqs - before.num_scheduled_seqs
        measured.widths.append((now, width))
        measured.num_busy += width
        measured.num_held += self._num_taken if self._holds_seats else width
        measured.num_positions += after.num_scheduled_tokens - before.num_scheduled_tokens
