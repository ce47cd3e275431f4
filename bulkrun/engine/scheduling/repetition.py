"""Whether an output runs in circles, found out token by token. Pure Python; knows no sequence and no ending.

A tail has period p when each of its tokens equals the one p places before. For every p the length of the matching
run is known from the step before: it grows by one when the new token stands p places back as well, and is lost
otherwise. So only the places where the new token occurred lately are looked at, which are few in ordinary text.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from bulkrun.request import RepetitionStop


class Circle(NamedTuple):
    """What an output runs in: a pattern of so many tokens, so often."""

    length: int
    repeats: int


class RepetitionWatch:
    """Watches one growing output; holds at most `max_pattern` positions and runs."""

    def __init__(self, limits: RepetitionStop) -> None:
        self._limits = limits
        self._recent: deque[int] = deque()  # the last max_pattern tokens
        self._positions: dict[int, deque[int]] = {}  # where each of them stands
        self._runs: dict[int, int] = {}  # pattern length -> how many of the last tokens equal the one so far back
        self._num_tokens = 0

    def append(self, token_id: int) -> Circle | None:
        """Add one token; the circle when the output's tail is one pattern often enough, else None.

        The tail must be `repeats` whole patterns and `min_tokens` tokens long; the shortest pattern is named.
        """
        position, limits = self._num_tokens, self._limits
        earlier = self._positions.setdefault(token_id, deque())
        self._runs = {position - past: self._runs.get(position - past, 0) + 1 for past in reversed(earlier)}
        earlier.append(position)
        self._recent.append(token_id)
        self._num_tokens += 1
        if len(self._recent) > limits.max_pattern:
            self._forget_oldest()
        for length, run in self._runs.items():  # shortest first
            tail = run + length
            if tail >= limits.repeats * length and tail >= limits.min_tokens:
                return Circle(length, tail // length)
        return None

    def _forget_oldest(self) -> None:
        token_id = self._recent.popleft()
        self._positions[token_id].popleft()
        if not self._positions[token_id]:
            del self._positions[token_id]
