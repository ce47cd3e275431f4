"""Prompts of one Python call on their way through an engine: read ahead a little, handed out as they end.

Between what was read and what was handed out there are never more prompts than the window, so an endless iterator
runs in bounded memory. Knows requests and answers; knows no models, files or runs.
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import Any, NamedTuple, TypeVar

from bulkrun.errors import UsageError
from bulkrun.job.store.journal import JournalRecord
from bulkrun.job.work.answers import Answer, AnswerReader
from bulkrun.job.work.shard_work import Generation
from bulkrun.request import Completion, Engine, FinishReason, Request, RowError, SamplingParams

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What became of one prompt, the `index`-th of its call.

    `error` is None if and only if `text` is an answer; a prompt that failed may have the text that came before.
    `reasoning`, `parsed` and the log-probabilities are there where the sampling asks for them.
    """

    index: int
    prompt: str | None  # as text, None where token ids or nothing usable were given
    text: str | None
    finish_reason: FinishReason
    error: RowError | None = None
    token_ids: tuple[int, ...] = ()
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    reasoning: str | None = None
    parsed: Any = None
    logprobs: list[dict[str, Any]] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    cumulative_logprob: float | None = None


class Asked(NamedTuple):
    """One prompt: its text, or its token ids, and how to sample; or why it cannot run."""

    text: str | None
    token_ids: Sequence[int] | None
    sampling: SamplingParams
    seed: int
    error: RowError | None = None


class SharedEngine:
    """One engine for several streams. Threads take turns at it: whose turn it is makes a step for all of them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._process = os.getpid()
        self._turn = threading.Lock()
        self._receivers: dict[str, Callable[[Completion], None]] = {}
        self._unwanted: deque[str] = deque()
        self._ids = count()

    def check_process(self) -> None:
        """Raise UsageError in a child that was forked: threads, and with them the engine, stay in the parent."""
        if os.getpid() != self._process:
            raise UsageError("this LLM belongs to the process that made it; after os.fork() the child makes its own")

    def add(
        self, prompts: Sequence[tuple[Sequence[int], Asked]], receive: Callable[[Request, Completion], None]
    ) -> list[str]:
        """Queue prompts, all in one turn; `receive` is called for each when it has ended, in any thread.

        Returns the requests' ids.
        """
        requests = [Request(f"{next(self._ids)}", ids, asked.sampling, asked.seed) for ids, asked in prompts]
        with self._turn:
            for request in requests:
                self.engine.add_request(request)
                self._receivers[request.request_id] = partial(receive, request)
        return [request.request_id for request in requests]

    def step(self) -> None:
        """One step of the engine; the streams that asked for what ended in it are told."""
        with self._turn:
            self._drop_unwanted()
            for done in self.engine.step():
                self._receivers.pop(done.request_id)(done)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget requests that nobody waits for any more, before the next step.

        Waits for nobody: an abandoned iterator may be collected as garbage in the middle of a turn.
        """
        self._unwanted.extend(request_ids)
        if self._turn.acquire(blocking=False):
            try:
                self._drop_unwanted()
            finally:
                self._turn.release()

    def _drop_unwanted(self) -> None:
        """Some may have ended in another stream's step."""
        unwanted = _taken(self._unwanted)
        known = [request_id for request_id in unwanted if request_id in self._receivers]
        self.engine.abort(known)
        for request_id in known:
            del self._receivers[request_id]


class PromptStream:
    """An iterator over the outputs of `asked`; ordered as the prompts came, or as they end.

    One thread at a time advances it; what it is told of ends comes from any.
    """

    def __init__(
        self,
        shared: SharedEngine,
        reader: AnswerReader,
        encode: Callable[[list[str]], list[list[int]]],
        asked: Iterator[Asked],
        *,
        ordered: bool,
    ) -> None:
        self._shared, self._reader, self._encode = shared, reader, encode
        self._asked, self._ordered = enumerate(asked), ordered
        self._window = 2 * shared.engine.max_num_seqs
        self._running: dict[str, tuple[int, Asked]] = {}
        self._ended: deque[tuple[Request, Completion]] = deque()
        self._waiting: dict[int, RequestOutput] = {}  # ended, and not handed out yet
        self._next = 0
        self._exhausted = False

    def outputs(self) -> Iterator[RequestOutput]:
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
        texts = [one.text for _, one in batch if one.error is None and one.token_ids is None and one.text is not None]
        encoded = iter(self._encode(texts) if texts else [])
        good: list[tuple[int, Asked]] = []
        for index, one in batch:
            if one.error is not None:
                self._waiting[index] = RequestOutput(index, one.text, None, "error", one.error)
            else:
                good.append((index, one))
        prompts = [(next(encoded) if one.token_ids is None else one.token_ids, one) for _, one in good]
        self._running.update(zip(self._shared.add(prompts, self._receive), good, strict=True))

    def _receive(self, request: Request, done: Completion) -> None:
        self._ended.append((request, done))

    def _read_ended(self) -> None:
        """Turn what ended into outputs, all of a step together."""
        ended = _taken(self._ended)
        whose = [self._running.pop(request.request_id) for request, _ in ended]
        answers = [
            Answer(Generation(request, shard=0, rows=(index,), sample=0), done)
            for (request, done), (index, _) in zip(ended, whose, strict=True)
        ]
        for (index, asked), (_, done), record in zip(whose, ended, self._reader.records(answers), strict=True):
            self._waiting[index] = _output(index, asked, done, record)

    def _take_ready(self) -> list[RequestOutput]:
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


def _output(index: int, asked: Asked, done: Completion, record: JournalRecord) -> RequestOutput:
    structured, error = asked.sampling.structured_outputs, None
    if record.error_code is not None:
        error = RowError(record.error_code, record.error_message or "")
    parsed = None
    if error is None and structured is not None and structured.kind == "json":
        parsed = json.loads(record.response or "null")
    return RequestOutput(
        index=index,
        prompt=asked.text,
        text=record.response,
        finish_reason=done.finish_reason,
        error=error,
        token_ids=done.token_ids,
        num_prompt_tokens=record.prompt_tokens,
        num_cached_tokens=record.cached_tokens,
        num_output_tokens=record.completion_tokens,
        reasoning=record.extra.get("reasoning"),
        parsed=parsed,
        logprobs=record.extra.get("logprobs"),
        prompt_logprobs=record.extra.get("prompt_logprobs"),
        cumulative_logprob=record.extra.get("cumulative_logprob"),
    )
