"""Words that an output must not hold, and the only tokens it may be made of, beside whatever else binds it.

Names and meanings are vLLM's (`bad_words`, `allowed_token_ids`), but that a word is forbidden in all the ways in which
the tokenizer writes it: with a space before it also where that takes another number of tokens, and behind other text
also where a tokenizer begins each text with a space of its own (SentencePiece). Where other tokens spell the word it
can still come. Knows no grammar: that is another constraint.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from bulkrun.request import Progress, TokenConstraint
from bulkrun.text.tokenizer import Tokenizer


def word_token_ids(tokenizer: Tokenizer, words: Iterable[str]) -> list[list[int]]:
    """The tokens of each word at the beginning of a text, behind a space and behind other text.

    Raises ValueError for a word that has none, or is no text.
    """
    token_ids: list[list[int]] = []
    for word in words:
        if not _is_unicode(word):
            raise ValueError(f"bad_words: {word!r} holds half a surrogate pair, which is not text")
        bare = word.lstrip(" ") or word
        newline, behind, *forms = tokenizer.encode_batch(["\n", f"\n{bare}", bare, f" {bare}"], False)
        if not forms[0]:
            raise ValueError(f"bad_words: {word!r} has no tokens in this model's tokenizer; leave it out")
        if behind[: len(newline)] == newline:
            forms.append(behind[len(newline) :])
        token_ids += [form for form in forms if form]
    return token_ids


class TokenLists:
    """What the lists of one sampling say of the next token. Its sequences share it, in several threads.

    `words` are the tokens of each forbidden word, at least one; `allowed` None: every token is.
    """

    def __init__(self, words: Iterable[Sequence[int]], allowed: Sequence[int] | None) -> None:
        ends: dict[tuple[int, ...], set[int]] = {}
        for *begin, end in words:
            ends.setdefault(tuple(begin), set()).add(end)
        self._never = frozenset(ends.pop((), ()))
        self._allowed = None if allowed is None else frozenset(allowed)
        self._ends = ends  # by the beginning of a word, which several may have
        self._lengths = sorted({len(begin) for begin in ends})
        self.window = max(self._lengths, default=0)  # of an output's last tokens that count
        self.is_always = bool(self._never) or allowed is not None  # whether something is forbidden everywhere
        self._always = b""

    def always(self, num_bytes: int) -> bytes:
        """A mask of that size of the tokens that are not forbidden everywhere: bit k of byte b is token 8 b + k."""
        mask = self._always
        if len(mask) != num_bytes:  # once: an engine's masks have one size
            self._always = mask = self._mask(num_bytes)
        return mask

    def ending(self, tail: Sequence[int]) -> set[int]:
        """The tokens that would make an output's last ones the whole of a word."""
        found: set[int] = set()
        for length in self._lengths:
            if length <= len(tail):
                found |= self._ends.get(tuple(tail[-length:]), set())
        return found

    def allows(self, token_id: int, tail: Sequence[int]) -> bool:
        """Whether a token may come behind an output's last ones."""
        is_listed = self._allowed is None or token_id in self._allowed
        return is_listed and token_id not in self._never and token_id not in self.ending(tail)

    def _mask(self, num_bytes: int) -> bytes:
        mask = bytearray(num_bytes) if self._allowed is not None else bytearray(b"\xff" * num_bytes)
        for token_id in self._allowed or ():
            mask[token_id // 8] |= 1 << token_id % 8
        for token_id in self._never:
            forbid(mask, token_id)
        return bytes(mask)


class ListedTokens:
    """The lists of one sequence, over the constraint that binds it as well (None: nothing else does)."""

    def __init__(self, lists: TokenLists, inner: TokenConstraint | None = None) -> None:
        self._lists, self._inner = lists, inner
        self._tail: deque[int] = deque(maxlen=lists.window)

    def fill_mask(self, mask: memoryview[int]) -> bool:
        is_restricted = self._inner is not None and self._inner.fill_mask(mask)
        ending = self._lists.ending(tuple(self._tail))
        if not self._lists.is_always and not ending:
            return is_restricted
        octets = mask.cast("B")
        always = self._lists.always(len(octets))
        octets[:] = _both(octets, always) if is_restricted else always
        for token_id in ending:
            forbid(octets, token_id)
        return True

    def accept(self, token_id: int) -> str | None:
        self._tail.append(token_id)
        return None if self._inner is None else self._inner.accept(token_id)

    def forced_tokens(self) -> Sequence[int]:
        """What the other constraint leaves no choice about, up to a token that the lists forbid: none is left there."""
        tail, forced = list(self._tail), []
        for token_id in () if self._inner is None else self._inner.forced_tokens():
            if not self._lists.allows(token_id, tail):
                break
            forced.append(token_id)
            tail.append(token_id)
        return forced

    def progress(self, stop_reason: int | str | None = None) -> Progress:
        return "whole" if self._inner is None else self._inner.progress(stop_reason)


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def forbid(mask: bytearray | memoryview[int], token_id: int) -> None:
    """Take a token out of a mask of bytes; a tokenizer may have more tokens than its model."""
    if token_id // 8 < len(mask):
        mask[token_id // 8] &= 0xFF ^ (1 << token_id % 8)


def _both(one: memoryview[int], other: bytes) -> bytes:
    return (int.from_bytes(one, "little") & int.from_bytes(other, "little")).to_bytes(len(other), "little")
