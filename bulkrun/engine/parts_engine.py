"""Prompts of several texts, in an engine that embeds or classifies one text a request: each part is a request there,
equal ones are one, and the numbers of all come back as one completion.

Parts go in a few steps' worth at a time: a request of thousands would fill the engine's queue, and memory, at once.
Speaks token ids; knows no text, files, rows or jobs. Implements `bulkrun.request.Engine`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from bulkrun.request import Completion, Engine, EngineStats, PartialOutput, PartKind, Request, part_name

_STEPS_AHEAD = 4  # among so many texts those of a step may be of similar lengths


@dataclass
class _Whole:
    """A request of several texts, and what became of its parts so far, by number. `texts` are the different ones of its
    parts, each by the number of the first such part; `first` has this number for every part."""

    request: Request
    texts: dict[int, Sequence[int]]
    first: list[int]
    done: dict[int, Completion] = field(default_factory=dict)

    @classmethod
    def of(cls, request: Request) -> _Whole:
        numbers: dict[tuple[int, ...], int] = {}
        first, start = list[int](), 0
        for number, length in enumerate(request.parts):
            ids = tuple(request.prompt_token_ids[start : start + length])
            first.append(numbers.setdefault(ids, number))
            start += length
        return cls(request, {number: ids for ids, number in numbers.items()}, first)

    @property
    def num_missing(self) -> int:
        """Texts that have not ended."""
        return len(self.texts) - len(self.done)


class PartsEngine:
    """Around an engine that is nobody else's. Not thread-safe: one caller adds and steps."""

    def __init__(self, engine: Engine, part: PartKind) -> None:
        """`part`: what the parts are, for errors."""
        self._engine, self._part = engine, part
        self._wholes: dict[str, _Whole] = {}
        self._waiting: deque[Iterator[Request]] = deque()  # of each request the parts that are not in the engine
        self._inside: dict[str, tuple[str, int]] = {}  # a part in the engine -> its request, and its number there

    @property
    def max_model_len(self) -> int:
        """Most tokens one text may have."""
        return self._engine.max_model_len

    @property
    def max_num_seqs(self) -> int:
        """Most texts of one step."""
        return self._engine.max_num_seqs

    def add_request(self, request: Request) -> None:
        """Queue a request, of one text or of several."""
        if not request.parts:
            self._engine.add_request(request)
            return
        assert sum(request.parts) == len(request.prompt_token_ids), "parts are all of a prompt"
        self._wholes[request.request_id] = whole = _Whole.of(request)
        self._waiting.append(self._parts(whole))

    def step(self) -> list[Completion]:
        """Run one forward pass; the requests all of whose texts have ended."""
        self._fill()
        ended = (self._taken_in(done) for done in self._engine.step())
        return [completion for completion in ended if completion is not None]

    def has_unfinished(self) -> bool:
        """Whether any added request has not ended yet."""
        return bool(self._wholes) or self._engine.has_unfinished()

    def abort(self, request_ids: Sequence[str]) -> None:
        """Drop requests without a completion."""
        ids = set(request_ids)
        parts = [name for name, (whole, _) in self._inside.items() if whole in ids]
        self._engine.abort([*request_ids, *parts])
        for name in parts:
            del self._inside[name]
        for name in ids:
            self._wholes.pop(name, None)  # its parts that wait end with it

    def partial_outputs(self) -> list[PartialOutput]:
        """Those of the engine: none where it makes numbers of texts."""
        return self._engine.partial_outputs()

    def stats(self) -> EngineStats:
        """The engine's, which counts texts, with those that wait to enter it."""
        stats = self._engine.stats()
        unfinished = sum(whole.num_missing for whole in self._wholes.values())
        return replace(stats, num_waiting=stats.num_waiting + unfinished - len(self._inside))

    def _fill(self) -> None:
        room = _STEPS_AHEAD * self.max_num_seqs - len(self._inside)
        while self._waiting and room > 0:
            if (part := next(self._waiting[0], None)) is None:
                self._waiting.popleft()
                continue
            self._engine.add_request(part)
            room -= 1

    def _parts(self, whole: _Whole) -> Iterator[Request]:
        """The parts of a request as they enter the engine; no more once the request was dropped."""
        request = whole.request
        for number, ids in whole.texts.items():
            if self._wholes.get(request.request_id) is not whole:
                return
            name = f"{request.request_id}/{number}"
            self._inside[name] = request.request_id, number
            yield replace(request, request_id=name, prompt_token_ids=ids, parts=())

    def _taken_in(self, done: Completion) -> Completion | None:
        """What ended, if it is a whole request."""
        if done.request_id not in self._inside:
            return done
        name, number = self._inside.pop(done.request_id)
        whole = self._wholes[name]
        whole.done[number] = done
        if whole.num_missing:
            return None
        del self._wholes[name]
        return _joined(whole, self._part)


def _joined(whole: _Whole, kind: PartKind) -> Completion:
    """The numbers of all parts in their order; of a request with a part that failed, the first such error alone."""
    parts = [whole.done[number] for number in whole.first]
    for number, part in enumerate(parts):
        if part.error is not None:
            error = part.error._replace(message=f"{part_name(kind, number)}: {part.error.message}")
            return _ended(whole.request, replace(part, error=error))
    return _ended(whole.request, replace(parts[0], embedding=b"".join(part.embedding or b"" for part in parts)))


def _ended(request: Request, like: Completion) -> Completion:
    num_tokens = len(request.prompt_token_ids)
    return replace(like, request_id=request.request_id, num_prompt_tokens=num_tokens)
