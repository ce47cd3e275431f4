"""A reasoning model's thoughts, token by token: free up to their budget, then their end is written, then the answer.

Chat templates differ in who begins the thoughts: the model (Qwen3), or the prompt that ends with the start marker
(Qwen3-Thinking, DeepSeek-R1); a prompt that ends with the end marker wants none. So: a prompt that ends with the start
marker leaves the output in its thoughts, one that ends with the end marker in its answer, and else the output begins
its thoughts with the marker or is the answer from its first token; of a message that is continued, its text tells
(`Thinking.begun`). A grammar binds the answer only. Markers are looked for in the text, whatever tokens it is made of.
Knows no grammar: what binds the answer is another constraint.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

from bulkrun.request import Progress, Thinking
from bulkrun.text.byte_tokens import REPLACEMENT
from bulkrun.text.tokenizer import Tokenizer

_PROMPT_END_TOKENS = 64  # a marker and the white space after it are fewer
_MAX_CONTINUATION = 4  # tokens of a character that began before a marker


class AnswerConstraint(Protocol):
    """What binds the answer: a constraint that can be tried on a copy."""

    def fill_mask(self, mask: memoryview[int]) -> bool:
        """Write the allowed tokens."""

    def accept(self, token_id: int) -> str | None:
        """Go on with a token, or say why not."""

    def forced_tokens(self) -> Sequence[int]:
        """Tokens that have to come next."""

    def progress(self, stop_reason: int | str | None = None) -> Progress:
        """Where the answer stands, or stood before the stop."""

    def copy(self) -> AnswerConstraint:
        """Another one at the same place."""


class ThinkingMarkers:
    """The start and end markers in one tokenizer: their tokens, and where they stand in what was generated.

    Raises ValueError for a marker that the tokenizer cannot write.
    """

    def __init__(self, tokenizer: Tokenizer, start: str, end: str) -> None:
        self._tokenizer = tokenizer
        self.start, self.end = start, end
        self.start_ids, self.end_ids = (tuple(ids) for ids in tokenizer.encode_batch([start, end], False))
        for marker, ids in ((start, self.start_ids), (end, self.end_ids)):
            if marker not in self.text(ids):
                raise ValueError(f"thinking: this model's tokenizer cannot write the marker {marker!r}")
        self.window = len(end.encode()) + _MAX_CONTINUATION  # tokens of the output that an end marker lies in

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of the tokens, special ones included."""
        return self._tokenizer.decode_batch([token_ids], skip_special_tokens=False)[0]

    def ids(self, text: str) -> list[int]:
        """The tokens of a text, nothing added."""
        return self._tokenizer.encode_batch([text], False)[0]

    def overshooting(self, tail: Sequence[int]) -> list[int]:
        """The tokens that would end the thoughts behind their last ones and begin the answer as well."""
        text = self.text(tail)
        return [token_id for begin, ids in self._overshooting.items() if text.endswith(begin) for token_id in ids]

    @cached_property
    def _overshooting(self) -> dict[str, list[int]]:
        """The tokens that hold the last of the end marker and go on, by what of it stands before them."""
        alone = [[token_id] for token_id in range(self._tokenizer.vocab_size)]
        texts = enumerate(self._tokenizer.decode_batch(alone, skip_special_tokens=False))
        near = [(i, most) for i, text in texts if self.end[-1] in (most := text.rstrip()[:-1])]
        found = {"": [i for i, most in near if self.end in most]}
        for at in range(1, len(self.end)):
            found[self.end[:at]] = [i for i, most in near if most.startswith(self.end[at:])]
        return found


class ThinkingConstraint:
    """Where one output of a reasoning model is, and what may come next there.

    `thinking` has the budget of thoughts (None: none) and, of a message that the prompt has begun, where that is;
    `answer` binds what comes after thoughts (None: nothing does; else there has to be an answer, and they cannot end
    the output).
    """

    def __init__(
        self,
        markers: ThinkingMarkers,
        thinking: Thinking,
        answer: AnswerConstraint | None,
        prompt_token_ids: Sequence[int] = (),
        *,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self._markers, self._max_tokens, self._answer = markers, thinking.max_tokens, answer
        self._eos_token_ids = eos_token_ids
        self._begun: AnswerConstraint | None = None  # the answer, where the output may be in it
        begun = thinking.begun_by(markers.text(prompt_token_ids[-_PROMPT_END_TOKENS:]))
        if begun == "thoughts":
            self._begin_thoughts()
        elif begun == "answer":
            self._begin_answer()
        else:
            self._begin_output()

    def fill_mask(self, mask: memoryview[int]) -> bool:
        return self._fill(mask)

    def accept(self, token_id: int) -> str | None:
        return self._accept(token_id)

    def forced_tokens(self) -> Sequence[int]:
        return self._force()

    def progress(self, stop_reason: int | str | None = None) -> Progress:
        return "unfinished" if self._begun is None else self._begun.progress(stop_reason)

    # The output has begun, and it is not known yet with what.

    def _begin_output(self) -> None:
        self._seen: list[int] = []
        # The answer is tried beside the start marker until the text tells them apart.
        self._trial = self._answer.copy() if self._answer is not None else None
        self._trial_failure: str | None = None
        self._begun = self._trial
        self._fill, self._accept, self._force = self._fill_opening, self._accept_opening, _force_nothing

    def _fill_opening(self, mask: memoryview[int]) -> bool:
        if self._trial is None:
            return False
        start = self._markers.start_ids
        at_start = tuple(self._seen) == start[: len(self._seen)]
        if self._trial_failure is None:
            self._trial.fill_mask(mask)
        else:
            _forbid_all(mask)
        if at_start:
            _allow(mask, start[len(self._seen)])
        return True

    def _accept_opening(self, token_id: int) -> str | None:
        self._seen.append(token_id)
        if self._trial is not None and self._trial_failure is None:
            self._trial_failure = self._trial.accept(token_id)
        text = self._markers.text(self._seen).lstrip()
        if text.startswith(self._markers.start):
            self._begin_thoughts()
            return self._think(text.removeprefix(self._markers.start))
        if self._markers.start.startswith(text.rstrip(REPLACEMENT)):  # half a character may become the marker's
            return None
        self._answer = self._trial
        self._begin_answer()
        return self._trial_failure

    # The output is in its thoughts.

    def _begin_thoughts(self) -> None:
        self._num_thoughts, self._forced = 0, self._markers.end_ids
        self._begun = None
        self._tail: list[int] = []
        self._fill, self._accept, self._force = self._fill_thinking, self._accept_thinking, self._force_thinking

    def _think(self, rest: str) -> str | None:
        """What the token that completed the start marker holds beyond it."""
        _, end, answer = rest.partition(self._markers.end)
        if end:
            return self._end_thoughts(answer.lstrip())
        self._tail = self._markers.ids(rest) if rest else []
        return None

    def _fill_thinking(self, mask: memoryview[int]) -> bool:
        if self._max_tokens is not None and self._num_thoughts >= self._max_tokens:
            _forbid_all(mask)
            _allow(mask, self._forced[0])
            return True
        if self._answer is not None:
            _allow_all_but(mask, [*self._eos_token_ids, *self._markers.overshooting(self._tail)])
        return self._answer is not None

    def _force_thinking(self) -> Sequence[int]:
        is_spent = self._max_tokens is not None and self._num_thoughts >= self._max_tokens
        return self._forced[:1] if is_spent else ()

    def _accept_thinking(self, token_id: int) -> str | None:
        self._num_thoughts += 1
        self._tail = [*self._tail, token_id][-self._markers.window :]
        _, end, rest = self._markers.text(self._tail).rpartition(self._markers.end)
        if end:
            return self._end_thoughts(rest.lstrip())
        if self._max_tokens is not None and self._num_thoughts >= self._max_tokens:
            self._force_end(token_id)
        return None

    def _force_end(self, token_id: int) -> None:
        """The rest of the end marker; the last tokens may already be its beginning."""
        if self._num_thoughts == self._max_tokens:
            end = self._markers.end_ids
            written = next(
                n for n in range(len(end) - 1, -1, -1) if tuple(self._tail[len(self._tail) - n :]) == end[:n]
            )
            self._forced = end[written:]
        else:
            assert token_id == self._forced[0], "only this token was allowed"
            self._forced = self._forced[1:]

    def _end_thoughts(self, rest: str) -> str | None:
        """Begin the answer with what the token that ended the marker holds beyond it."""
        self._begin_answer()
        failures = (self._accept(token_id) for token_id in self._markers.ids(rest)) if rest else ()
        return next((failure for failure in failures if failure is not None), None)

    # The output is in its answer.

    def _begin_answer(self) -> None:
        self._begun = self._answer
        self._fill, self._accept, self._force = self._fill_answer, self._accept_answer, self._force_answer

    def _fill_answer(self, mask: memoryview[int]) -> bool:
        return self._answer is not None and self._answer.fill_mask(mask)

    def _force_answer(self) -> Sequence[int]:
        return () if self._answer is None else self._answer.forced_tokens()

    def _accept_answer(self, token_id: int) -> str | None:
        return None if self._answer is None else self._answer.accept(token_id)


def _force_nothing() -> Sequence[int]:
    return ()


def _forbid_all(mask: memoryview[int]) -> None:
    mask[:] = memoryview(bytes(mask.nbytes)).cast("i")


def _allow_all_but(mask: memoryview[int], token_ids: Sequence[int]) -> None:
    mask[:] = memoryview(b"\xff" * mask.nbytes).cast("i")
    for token_id in token_ids:
        if _is_known(mask, token_id):
            mask[token_id // 32] &= ~_bit(token_id)


def _allow(mask: memoryview[int], token_id: int) -> None:
    if _is_known(mask, token_id):
        mask[token_id // 32] |= _bit(token_id)


def _is_known(mask: memoryview[int], token_id: int) -> bool:
    """A tokenizer may have more tokens than its model."""
    return token_id // 32 < len(mask)


def _bit(token_id: int) -> int:
    """The token's bit in its word, as a signed 32-bit number."""
    bit = 1 << token_id % 32
    return bit - (1 << 32) if bit >> 31 else bit
