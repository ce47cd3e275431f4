"""Stop strings: noticed as soon as the growing text of one sequence holds one, whatever tokens it is split over.

Decodes only the tail of the output that a stop string could lie in, so a token costs the same however long the output
is. Knows nothing of engines: a matcher gets token ids and answers with the stop string or None.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from bulkrun.request import StopMatcherFactory

_MAX_CONTINUATION = 3  # bytes of a character that the window starts inside of: U+FFFD each


class Decoder(Protocol):
    """What a matcher needs of a tokenizer."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that have no text in the output."""

    def decode_batch(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        """The text of each sequence."""


class TailStopMatcher:
    """Finds stop strings in the decoded tail of one sequence.

    Every token that is not special stands for at least one byte, so the last `bytes of the longest stop string`
    tokens, and a few for characters cut at the start of that window, hold any stop string that ends in the last token.
    """

    def __init__(self, decoder: Decoder, stop: Sequence[str]) -> None:
        assert all(stop), "a stop string is not empty"
        self._decoder = decoder
        self._stop = tuple(stop)
        longest = max((len(string.encode("utf-8", "surrogatepass")) for string in self._stop), default=0)
        # One more than needed: some decoders drop a space at the start of what they are given.
        self._window = longest + _MAX_CONTINUATION + 1
        self._tail: list[int] = []
        self._lost = ""  # what the decoder drops at the start of the window while that is the start of the output

    def append(self, token_id: int) -> str | None:
        """Add one token; the stop string that this token completes (the one that starts first), or None."""
        if token_id in self._decoder.special_ids:
            return None
        if not self._tail:
            self._lost = self._lost_before(token_id)
        self._tail = [*self._tail, token_id][-self._window :]
        if len(self._tail) == self._window:
            self._lost = ""
        text = self._text(self._tail)
        if not any(string in text for string in self._stop):
            return None
        # A match that lies wholly in older text was answered before (and not acted on: min_tokens).
        known = _common_prefix(text, self._text(self._tail[:-1]))
        found = [(text.find(string, max(0, known - len(string) + 1)), string) for string in self._stop]
        return min(((at, string) for at, string in found if at >= 0), default=(0, None))[1]

    def _lost_before(self, token_id: int) -> str:
        """The spaces that the output's first token begins with, where the decoder drops them: the prompt is before."""
        [once], [twice] = (self._decoder.decode_batch([[token_id] * count]) for count in (1, 2))
        lost = twice.removeprefix(once).removesuffix(once)
        return lost if twice == once + lost + once and not lost.strip() else ""

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._lost + self._decoder.decode_batch([token_ids])[0] if token_ids else ""


def _common_prefix(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


def stop_matcher_factory(decoder: Decoder) -> StopMatcherFactory:
    """The factory that an engine is given: `factory(stop)` watches one sequence."""
    return partial(TailStopMatcher, decoder)
