"""Prompts that do not fit the model: refused, or cut at their start or end.

A prompt is too long when not even one token of output fits after it; one that is embedded has no output (`max_tokens`
0), and may fill the model's length. A prompt that is kept leaves `max_tokens` less room than it asked for where the
model's length ends first. A cut prompt leaves room for all of `max_tokens`, but never loses more than to half of the
model's length (or of the row's budget). A row may have its own prompt cut, and then to fewer tokens. Of a pair of texts
the second is cut. Knows token ids only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.prompts.budget import RowBudget
from bulkrun.job.prompts.row_cut import Cut, RowCut
from bulkrun.request import RowError

OnTooLong = Literal["error"] | Cut


@dataclass(frozen=True)
class PromptFrame:
    """Token ids around the text of a prompt: BOS, the system message, a chat template's header and closing.

    Cutting keeps as much of them as a prompt has, or else the model would see half a conversation.
    """

    head: Sequence[int] = ()
    tail: Sequence[int] = ()
    of_pair: bool = False  # the first text is in it: where nothing of the second fits behind it, there is no pair

    @classmethod
    def between(cls, one: Sequence[int], other: Sequence[int]) -> PromptFrame:
        """What two prompts with entirely different contents have in common.

        Where they are one to the tokenizer, as letters are to that of proteins (both unknown), all of it may be at
        either end: a prompt that is cut has of it what it has.
        """
        head = _common(one, other)
        if head == len(one) == len(other):
            return cls(one, one)
        tail = _common(one[head:][::-1], other[head:][::-1])
        return cls(one[:head], one[len(one) - tail :])

    @classmethod
    def around_second(cls, token_ids: Sequence[int], start: int, end: int) -> PromptFrame:
        """Of a pair of texts: all but the second one, which lies from `start` to before `end`."""
        return cls(token_ids[:start], token_ids[end:], of_pair=True)


class PromptFitter:
    """Makes prompts fit `max_model_len` tokens the way `run.on_too_long` says, and rows their budget."""

    def __init__(self, max_model_len: int, on_too_long: OnTooLong, budget: RowBudget | None = None) -> None:
        self.budget = budget or RowBudget(None, outputs=1)
        self._max_model_len = max_model_len
        self._on_too_long = on_too_long

    def fit(
        self,
        token_ids: list[int],
        max_tokens: int,
        frame: Callable[[], PromptFrame] = PromptFrame,
        own: RowCut | None = None,
    ) -> list[int] | RowError:
        """The ids themselves when they fit, a cut list, or a `too_long` error. What the budget refuses is not cut.

        `frame` makes the prompt's frame, and is asked where it is cut; `own` is how the row wants it cut.
        """
        if own is not None and own.most is not None and len(token_ids) > own.most:
            cut = _cut(token_ids, own.most, frame(), own.how)
            return cut if isinstance(cut, RowError) else self._fit(cut, max_tokens, frame, self._on_too_long)
        policy = own.how if own is not None and own.most is None else self._on_too_long
        return self._fit(token_ids, max_tokens, frame, policy)

    def _fit(
        self, token_ids: list[int], max_tokens: int, frame: Callable[[], PromptFrame], policy: OnTooLong
    ) -> list[int] | RowError:
        if policy == "error":
            fits = len(token_ids) + min(1, max_tokens) <= self._max_model_len
            return token_ids if fits else self._refusal(len(token_ids), max_tokens)
        room = self._max_model_len - min(max_tokens, self._max_model_len // 2)
        if (in_budget := self.budget.prompt_room(max_tokens)) is not None and in_budget > 0:
            room = min(room, in_budget)
        return token_ids if len(token_ids) <= room else _cut(token_ids, room, frame(), policy)

    def _refusal(self, length: int, max_tokens: int) -> RowError:
        most = f"{self._max_model_len}, output included" if max_tokens else str(self._max_model_len)
        return RowError(
            "too_long", f"the prompt has {length} tokens and the model takes {most}; run.on_too_long can cut it"
        )


def fitter_of(spec: JobSpec, max_model_len: int) -> PromptFitter:
    """The fitter of a job."""
    sampling = spec.sampling
    budget = RowBudget(spec.run.max_tokens_per_row, sampling.generations, sampling.min_tokens)
    return PromptFitter(max_model_len, spec.run.on_too_long, budget)


def _cut(token_ids: list[int], room: int, frame: PromptFrame, how: Cut) -> list[int] | RowError:
    head = _common(token_ids, frame.head)
    tail = _common(token_ids[head:][::-1], frame.tail[::-1])
    keep = room - head - tail
    if keep <= 0 and frame.of_pair:
        return RowError(
            "too_long",
            f"the first text takes {head + tail} tokens with the special ones, and there is room for {room}: none is "
            "left for the second; only the second text is cut",
        )
    if keep <= 0:  # the frame itself is too long: cut it like any text
        head, tail, keep = 0, 0, room
    middle = token_ids[head : len(token_ids) - tail]
    middle = middle[-keep:] if how == "truncate_left" else middle[:keep]
    return [*token_ids[:head], *middle, *token_ids[len(token_ids) - tail :]]


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids two sequences have in common at their start."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
