"""Prompts of one Python call on their way through an engine: read ahead a little, handed out as they end.

Between what was read and what was handed out there are never more prompts than the window, so an endless iterator
runs in bounded memory. Knows requests and completions; what an output is, its caller says. Knows no models and no runs.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Generic, NamedTuple, NoReturn, Protocol, TypeVar

from bulkrun.errors import UsageError
from bulkrun.request import Completion, Engine, Request, RowError, SamplingParams

_T = TypeVar("_T")
_O = TypeVar("_O")
Receive = Callable[[Request, Completion], None]


class Asked(NamedTuple):
    """One prompt: its text, or its token ids, and how to sample; or why it cannot run."""

    text: str | None
    token_ids: Sequence[int] | None
    sampling: SamplingParams
    seed: int
    error: RowError | None = None
    text_pair: str | None = None  # the second text, of a pair
    has_special_tokens: bool = False  # in the text: a chat template wrote them


@dataclass(frozen=True, slots=True)
class Ended:
    """The `index`-th prompt of a call, and what became of it."""

    index: int
    asked: Asked
    request: Request
    done: Completion


class Outputs(Protocol[_O]):
    """What a call hands out."""

    def refused(self, index: int, asked: Asked) -> _O:
        """The output of a prompt that cannot run: `asked` has an error."""

    def read(self, ended: Sequence[Ended]) -> list[_O]:
        """The outputs of prompts that ended in one step."""


class SharedEngine:
    """One engine for several streams. Threads take turns at it: whose turn it is makes a step for all of them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._process = os.getpid()
        self._turn = threading.Lock()
        self._in_turn = False
        self._wanted: dict[str, tuple[Request, Receive]] = {}
        self._unwanted: deque[str] = deque()
        self._ids = count()

    def check_process(self) -> None:
        """Raise UsageError in a child that was forked: threads, and with them the engine, stay in the parent."""
        if os.getpid() != self._process:
            raise UsageError("this model belongs to the process that made it; after os.fork() the child makes its own")

    def __reduce__(self) -> NoReturn:
        raise UsageError("this model belongs to the process that made it; let each process make its own")

    def requests(self, prompts: Sequence[tuple[Sequence[int], Asked]]) -> list[Request]:
        """Prompts as requests with ids of their own, not queued yet."""
        return [Request(f"{next(self._ids)}", ids, asked.sampling, asked.seed) for ids, asked in prompts]

    def add(self, requests: Sequence[Request], receive: Receive) -> None:
        """Queue them, all in one turn; `receive` is called for each when it has ended, in any thread, rarely twice."""
        with self._turn:
            self._begin_turn()
            for request in requests:
                self._wanted[request.request_id] = request, receive
                self.engine.add_request(request)
            self._in_turn = False

    def step(self) -> None:
        """One step of the engine; the streams that asked for what ended in it are told."""
        with self._turn:
            self._begin_turn()
            for done in self.engine.step():
                request, receive = self._wanted[done.request_id]
                receive(request, done)
                del self._wanted[done.request_id]
            self._in_turn = False

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget requests that nobody waits for any more, before the next step.

        An abandoned iterator may be collected as garbage in the middle of a turn, this thread's even: then that is all.
        """
        self._unwanted.extend(request_ids)
        if not self._turn.locked():
            with self._turn:
                self._drop_unwanted()

    def _begin_turn(self) -> None:
        """Where Ctrl-C ended a turn in its middle, what others wait for may be lost: all of it is asked anew."""
        self._drop_unwanted()
        if self._in_turn:
            self.engine.abort(list(self._wanted))
            for request, _ in self._wanted.values():
                self.engine.add_request(request)
        self._in_turn = True

    def _drop_unwanted(self) -> None:
        """Some may have ended in another stream's step."""
        unwanted = _taken(self._unwanted)
        known = [request_id for request_id in unwanted if request_id in self._wanted]
        self.engine.abort(known)
        for request_id in known:
            del self._wanted[request_id]


class PromptStream(Generic[_O]):
    """An iterator over the outputs of `asked`; ordered as the prompts came, or as they end.

    One thread at a time advances it; what it is told of ends comes from any.
    """

    def __init__(
        self,
        shared: SharedEngine,
        made: Outputs[_O],
        encode: Callable[[list[Asked]], Sequence[Sequence[int] | RowError]],
        asked: Iterator[Asked],
        *,
        ordered: bool,
    ) -> None:
        """encode: prompts that are given as text, each to token ids, or why it has none."""
        self._shared, self._made, self._encode = shared, made, encode
        self._asked, self._ordered = enumerate(asked), ordered
        self._window = 2 * shared.engine.max_num_seqs
        self._running: dict[str, tuple[int, Asked]] = {}
        self._ended: deque[tuple[Request, Completion]] = deque()
        self._waiting: dict[int, _O] = {}  # ended, and not handed out yet
        self._next = 0
        self._exhausted = False

    def outputs(self) -> Iterator[_O]:
        """Every prompt's output. Abandoning the iterator drops what still runs."""
        try:
            while True:
                self._shared.check_process()
                self._top_up()
                ready = self._take_ready()
                yield from ready
                if ready:
                    continue
                if not self._running:
                    return
                if not self._ended:
                    self._shared.step()
                self._read_ended()
        finally:
            self._shared.abort(list(self._running))

    def _top_up(self) -> None:
        """Read prompts until the window is full; a quarter of it at once, so that they are tokenized together."""
        room = self._window - len(self._running) - len(self._waiting)
        if self._exhausted or room < max(1, self._window // 4):
            return
        batch = list(islice(self._asked, room))
        self._exhausted = len(batch) < room
        texts = [one for _, one in batch if one.error is None and one.token_ids is None]
        encoded = iter(self._encode(texts) if texts else [])
        good: list[tuple[int, Asked]] = []
        prompts: list[tuple[Sequence[int], Asked]] = []
        for index, one in batch:
            made = one.error or (next(encoded) if one.token_ids is None else one.token_ids)
            if isinstance(made, RowError):
                self._waiting[index] = self._made.refused(index, one._replace(error=made))
            else:
                good.append((index, one))
                prompts.append((made, one))
        requests = self._shared.requests(prompts)
        self._running.update(zip((request.request_id for request in requests), good, strict=True))
        self._shared.add(requests, self._receive)

    def _receive(self, request: Request, done: Completion) -> None:
        self._ended.append((request, done))

    def _read_ended(self) -> None:
        """Turn what ended into outputs, all of a step together."""
        ended = {request.request_id: (request, done) for request, done in _taken(self._ended)}
        whose = [Ended(*self._running.pop(name), *end) for name, end in ended.items() if name in self._running]
        for one, output in zip(whose, self._made.read(whose), strict=True):
            self._waiting[one.index] = output

    def _take_ready(self) -> list[_O]:
        ready = []
        if self._ordered:
            while self._next in self._waiting:
                ready.append(self._waiting.pop(self._next))
                self._next += 1
        else:
            ready, self._waiting = list(self._waiting.values()), {}
        return ready


def _taken(queue: deque[_T]) -> list[_T]:
    """All that is in it, taken out; others may put more in meanwhile."""
    return [queue.popleft() for _ in range(len(queue))]
