"""The order in which sequences wait: better priority first (smaller, as in vLLM), then who came first.

A preempted sequence keeps its arrival, so it stands before everyone of its priority who never ran. Knows no memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from bulkrun.engine.scheduling.sequence import Sequence


class WaitingQueue:
    """Sequences without a row; iterating goes from the head to the tail. Adding and popping cost O(log n)."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Sequence]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for _, seq in sorted(self._heap, key=lambda entry: entry[0]))

    @property
    def head(self) -> Sequence:
        """The next sequence; there must be one."""
        return self._heap[0][1]

    def add(self, seq: Sequence) -> None:
        """Let a sequence wait at its place. Arrivals are unique, so that the order is one."""
        heapq.heappush(self._heap, (seq.order, seq))

    def pop(self) -> Sequence:
        """Take the head out."""
        return heapq.heappop(self._heap)[1]

    def remove(self, seqs: list[Sequence]) -> None:
        """Remove these; those that do not wait are ignored."""
        if not seqs:
            return
        ids = set(map(id, seqs))
        self._heap = [entry for entry in self._heap if id(entry[1]) not in ids]
        heapq.heapify(self._heap)

    def longest_wait_s(self, now: float) -> float:
        """Seconds since the first of them arrived (`Sequence.arrived_at` and `now` are of one clock)."""
        return max((now - seq.arrived_at for _, seq in self._heap), default=0.0)
