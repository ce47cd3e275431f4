"""Stop strings: noticed as soon as the growing text of one sequence holds one, whatever tokens it is split over.

Decodes only the tail of the output that a stop string could lie in, so a token costs the same however long the output
is. Knows nothing of engines: a matcher gets token ids and answers with the stop string or None.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from bulkrun.request import StopMatcherFactory

# A window that starts inside a character decodes to U+FFFD there; a character has at most 3 more bytes.
_REPLACEMENT = "\ufffd"
_MAX_CONTINUATION = 3


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

    def append(self, token_id: int) -> str | None:
        """Add one token; the stop string that this token completes (the one that starts first), or None."""
        if token_id in self._decoder.special_ids:
            return None
        before = self._tail
        self._tail = [*before, token_id][-self._window :]
        text = self._text(self._tail)
        found = [(at, string) for string in self._stop if (at := text.rfind(string)) >= 0]
        if not found:
            return None
        # A match that lies wholly in older text was answered before (and not acted on: min_tokens).
        known = _common_prefix(text, self._text(self._tail[:-1]))
        return min(((at, string) for at, string in found if at + len(string) > known), default=(0, None))[1]

    def _text(self, token_ids: Sequence[int]) -> str:
        """The window's text; starting later where the window would begin inside a character."""
        text = ""
        for start in range(min(len(token_ids), _MAX_CONTINUATION + 1)):
            text = self._decoder.decode_batch([token_ids[start:]])[0]
            if not text.startswith(_REPLACEMENT):
                break
        return text


def _common_prefix(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


def stop_matcher_factory(decoder: Decoder) -> StopMatcherFactory:
    """The factory that an engine is given: `factory(stop)` watches one sequence."""
    return partial(TailStopMatcher, decoder)
