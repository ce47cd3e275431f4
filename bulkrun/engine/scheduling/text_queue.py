"""Requests that wait to be embedded, and which of them share a step. Pure Python.

A step takes the one whose turn it is, better priority first (smaller), then who came first, and beside it those of the
most similar lengths: little is padded then, and nobody waits longer than the requests before it take.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from bulkrun.request import Request


class _Waiting(NamedTuple):
    request: Request
    num_tokens: int
    arrival: int


class TextQueue:
    """Requests in the order they came. Those that are taken stay known until they are removed."""

    def __init__(self) -> None:
        self._waiting: list[_Waiting] = []
        self._taken: list[_Waiting] = []
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._taken)

    @property
    def num_waiting(self) -> int:
        """Requests in no step."""
        return len(self._waiting)

    @property
    def taken_ids(self) -> set[str]:
        """Requests that are in a step."""
        return {one.request.request_id for one in self._taken}

    def add(self, request: Request) -> None:
        """Let a request wait behind those of its priority."""
        self._num_added += 1
        self._waiting.append(_Waiting(request, len(request.prompt_token_ids), self._num_added))

    def take(self, max_num_seqs: int, max_num_tokens: int) -> list[Request]:
        """The requests of the next step, the shortest first; one that is longer than a step may be comes alone."""
        if not self._waiting:
            return []
        chosen = list(self._choose(max_num_seqs, max_num_tokens))
        self._taken += chosen
        ids = set(map(id, chosen))
        self._waiting = [waiting for waiting in self._waiting if id(waiting) not in ids]
        return [waiting.request for waiting in sorted(chosen, key=lambda waiting: waiting.num_tokens)]

    def _choose(self, max_num_seqs: int, max_num_tokens: int) -> Iterator[_Waiting]:
        head = min(self._waiting, key=lambda waiting: waiting.request.priority)  # of equals the first
        left_seqs, left_tokens = max_num_seqs - 1, max_num_tokens - head.num_tokens
        yield head
        for waiting in sorted(
            self._waiting, key=lambda one: (one.request.priority, abs(one.num_tokens - head.num_tokens))
        ):
            if left_seqs <= 0 or left_tokens <= 0:
                return
            if waiting is not head and waiting.num_tokens <= left_tokens:
                yield waiting
                left_seqs, left_tokens = left_seqs - 1, left_tokens - waiting.num_tokens

    def put_back(self) -> None:
        """Let those that were taken wait again, where they waited before."""
        self._waiting, self._taken = sorted(self._taken + self._waiting, key=lambda one: one.arrival), []

    def remove(self, request_ids: Collection[str]) -> None:
        """Forget these requests, wherever they are."""
        self._waiting = [one for one in self._waiting if one.request.request_id not in request_ids]
        self._taken = [one for one in self._taken if one.request.request_id not in request_ids]
