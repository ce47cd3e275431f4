"""Prompt texts to token ids, so much at once as memory allows. Any thread may call it.

Text that a chat template wrote is tokenized as it is (the special tokens are in it), plain text with the model's own
(BOS); a pair of texts is joined by the tokenizer. Knows no rows and no templates.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain, islice
from typing import NamedTuple, TypeVar

from bulkrun.job.prompts.fit import PromptFrame
from bulkrun.job.prompts.overrides import NO_OUTPUT, RowSampling
from bulkrun.job.prompts.own_values import PARTS
from bulkrun.job.prompts.row_cut import RowCut
from bulkrun.job.prompts.text_codec import TextCodec
from bulkrun.request import PartKind, RowError, part_name

CHARACTERS_AT_ONCE = 2**20  # a tokenizer takes some 150 bytes for each while it works

_Text = TypeVar("_Text", str, tuple[str, str])
_Ids = TypeVar("_Ids")


class Prompt(NamedTuple):
    """What a row asks: token ids, and its sampling. `frame` makes its frame, for a prompt that must be cut; `cut` is
    how the row itself wants it cut.

    `parts`: of a row of `several` texts, or pairs of them, each one's, whose token ids stand here one after the other.
    """

    token_ids: list[int]
    sampling: RowSampling
    frame: Callable[[], PromptFrame] = PromptFrame
    parts: tuple[Prompt, ...] = ()
    several: PartKind = "text"
    cut: RowCut | None = None


class RenderedPrompt(NamedTuple):
    """A prompt as text, not tokenized yet; `raw` text gets the model's special tokens (BOS)."""

    text: str
    sampling: RowSampling
    raw: bool
    frame: Callable[[], PromptFrame]
    pairs: tuple[tuple[str, str], ...] = ()  # of a job of pairs, in the place of the text
    texts: tuple[RenderedPrompt, ...] = ()  # of a job of lists of texts, in its place too
    token_ids: list[int] | None = None  # in its place too, where a row brings them
    cut: RowCut | None = None

    @property
    def size(self) -> int:
        """Characters of all its texts, or how many token ids it brings."""
        if self.token_ids is not None:
            return len(self.token_ids)
        return sum(one.size for one in self.texts) if self.texts else sum(map(_size, self.pairs or (self.text,)))


class PromptEncoder:
    """Of one job; `of_pairs`: its prompts are pairs of texts; those of lists of texts say so themselves, and `several`
    what these are."""

    def __init__(self, text: TextCodec, *, of_pairs: bool, several: PartKind = "text") -> None:
        self._text, self._of_pairs, self._several = text, of_pairs, several
        self._long_text = threading.Lock()

    def encode(self, rendered: Sequence[RenderedPrompt | RowError]) -> list[Prompt | RowError]:
        """Tokenize the texts of one batch, those of each kind together."""
        if self._of_pairs:
            return self._encode_pairs(rendered)
        if any(isinstance(p, RenderedPrompt) and p.texts for p in rendered):
            return self._encode_lists(rendered)
        given = {i: p for i, p in enumerate(rendered) if isinstance(p, RenderedPrompt)}
        token_ids = {i: p.token_ids for i, p in given.items() if p.token_ids is not None}
        texts = {i: p for i, p in given.items() if p.token_ids is None}
        for raw in (False, True):
            kind = {i: p.text for i, p in texts.items() if p.raw is raw}
            if kind:
                encode = partial(self._text.encode_batch, add_special_tokens=raw)
                token_ids |= zip(kind, self._encoded(list(kind.values()), encode), strict=True)
        return [_tokenized(p, token_ids[i]) if isinstance(p, RenderedPrompt) else p for i, p in enumerate(rendered)]

    def _encode_lists(self, rendered: Sequence[RenderedPrompt | RowError]) -> list[Prompt | RowError]:
        made = iter(self.encode([text for p in rendered if isinstance(p, RenderedPrompt) for text in p.texts]))
        return [
            joined([*islice(made, len(p.texts))], self._several) if isinstance(p, RenderedPrompt) else p
            for p in rendered
        ]

    def _encode_pairs(self, rendered: Sequence[RenderedPrompt | RowError]) -> list[Prompt | RowError]:
        pairs = [pair for p in rendered if isinstance(p, RenderedPrompt) for pair in p.pairs]
        cuts = [p.cut for p in rendered if isinstance(p, RenderedPrompt) for _ in p.pairs]
        made = map(_paired, self._encoded(pairs, self._text.encode_pairs), cuts)
        return [joined([*islice(made, len(p.pairs))], "pair") if isinstance(p, RenderedPrompt) else p for p in rendered]

    def _encoded(self, texts: Sequence[_Text], encode: Callable[[Sequence[_Text]], Sequence[_Ids]]) -> list[_Ids]:
        """The ids of many texts, so much at once as memory allows: one that alone is more waits for any other such."""
        token_ids: list[_Ids] = []
        for some in _portions(texts):
            with self._long_text if _size(some[0]) > CHARACTERS_AT_ONCE else nullcontext():
                token_ids += encode(some)
        return token_ids


def _size(text: str | tuple[str, str]) -> int:
    """Characters of a text, or of both."""
    return len(text) if isinstance(text, str) else sum(map(len, text))


def _portions(texts: Sequence[_Text]) -> Iterator[list[_Text]]:
    """The texts in their order, no more than `CHARACTERS_AT_ONCE` together unless one alone is longer."""
    some: list[_Text] = []
    characters = 0
    for text in texts:
        if some and characters + _size(text) > CHARACTERS_AT_ONCE:
            yield some
            some, characters = [], 0
        some.append(text)
        characters += _size(text)
    if some:
        yield some


def _tokenized(prompt: RenderedPrompt, token_ids: list[int]) -> Prompt | RowError:
    if not token_ids:
        return RowError("empty_prompt", "the prompt has no tokens")
    return Prompt(token_ids, prompt.sampling, prompt.frame, cut=prompt.cut)


def _paired(made: tuple[list[int], int, int] | RowError, cut: RowCut | None) -> Prompt | RowError:
    if isinstance(made, RowError):
        return made
    return Prompt(made[0], NO_OUTPUT, partial(PromptFrame.around_second, *made), cut=cut)


def joined(parts: Sequence[Prompt | RowError], several: PartKind) -> Prompt | RowError:
    """One prompt of the parts of a row, which are called `several`; a single one is itself. A row of which one fails
    has no answer.

    How long the parts are is a value of the row's own, so that it is planned once, and equal ids in other parts differ.
    """
    for number, part in enumerate(parts):
        if isinstance(part, RowError):
            return part if len(parts) == 1 else part._replace(message=f"{part_name(several, number)}: {part.message}")
    whole = tuple(part for part in parts if isinstance(part, Prompt))
    if len(whole) == 1:
        return whole[0]
    lengths = json.dumps({PARTS: [len(part.token_ids) for part in whole]}, separators=(",", ":"))
    token_ids = list(chain.from_iterable(part.token_ids for part in whole))
    return Prompt(token_ids, NO_OUTPUT._replace(overrides=lengths), parts=whole, several=several)
