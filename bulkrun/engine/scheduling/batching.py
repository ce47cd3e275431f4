"""When waiting sequences may join: the three batching policies, on the same scheduler, cache and kernels.

A policy counts seats; which sequence takes one, and whether memory has room for it, is the scheduler's business.
None of them pads: the engine computes the tokens that exist, and a seat whose sequence has ended costs nothing but
the chance to use it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol, get_args

from bulkrun.engine.scheduling.waiting import WaitingQueue
from bulkrun.errors import UsageError
from bulkrun.settings import Batching


class BatchingPolicy(Protocol):
    """Asked once per step before any sequence is admitted, and told afterwards how many were."""

    def num_seats(self, num_running: int, waiting: WaitingQueue) -> int:
        """The most sequences that may be admitted in this step; rows and memory may allow fewer."""

    def let_in(self, count: int, *, out_of_tokens: bool) -> None:
        """So many took a seat; `out_of_tokens`: more might have, had the step's token budget not been used up."""


class ContinuousBatching:
    """A seat is free as soon as its sequence ends."""

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs

    def num_seats(self, num_running: int, waiting: WaitingQueue) -> int:
        return self._max_num_seqs

    def let_in(self, count: int, *, out_of_tokens: bool) -> None:
        """Nothing to remember."""


class StaticBatching:
    """Whoever waits makes up a batch, which runs to its last sequence before anybody else is let in.

    A batch fills over several steps where its prompts are more than one step computes. A sequence that is preempted
    for memory joins the next batch, at its head.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._num_seats = 0  # of the batch that is filling

    def num_seats(self, num_running: int, waiting: WaitingQueue) -> int:
        if num_running == 0:
            self._num_seats = self._max_num_seqs if self._starts(waiting) else 0
        return self._num_seats

    def let_in(self, count: int, *, out_of_tokens: bool) -> None:
        self._num_seats = self._num_seats - count if out_of_tokens else 0

    def _starts(self, waiting: WaitingQueue) -> bool:
        return len(waiting) > 0


class DynamicBatching(StaticBatching):
    """Static, but a batch starts only when it is full or a sequence has waited for `window_s`."""

    def __init__(self, max_num_seqs: int, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(max_num_seqs)
        self._window_s = window_s
        self._clock = clock

    def _starts(self, waiting: WaitingQueue) -> bool:
        return len(waiting) >= self._max_num_seqs or (
            len(waiting) > 0 and waiting.longest_wait_s(self._clock()) >= self._window_s
        )


def batching_policy(
    batching: Batching, max_num_seqs: int, window_s: float, clock: Callable[[], float]
) -> BatchingPolicy:
    """The policy of a name; `window_s` is that of `dynamic`."""
    if batching == "continuous":
        return ContinuousBatching(max_num_seqs)
    if batching == "static":
        return StaticBatching(max_num_seqs)
    return DynamicBatching(max_num_seqs, window_s, clock)


def check_batching(batching: str, window_s: float) -> None:
    """Raises UsageError for a policy that does not exist and a window that never ends."""
    if batching not in get_args(Batching):
        raise UsageError(f"engine.batching: {batching!r} is not one of {', '.join(get_args(Batching))}")
    if not 0 <= window_s < math.inf:
        raise UsageError(f"engine.batching_window_s: {window_s} is not a number of seconds from 0 up")
