"""Log-probabilities as values of the columns `logprobs` and `prompt_logprobs`: token ids get their text.

A token's text is what it adds to text before it: half a character is U+FFFD, special tokens have their names. Knows
the tokenizer as a function, and nothing of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from bulkrun.data.types.json_types import as_unicode
from bulkrun.job.outputs.output_text import Decode
from bulkrun.request import TokenLogprob


class TokenTexts:
    """The text of single tokens, each asked for once; grows to the model's vocabulary at most."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._texts: dict[int, str] = {}

    def learn(self, token_ids: Iterable[int]) -> None:
        """Decode the tokens that are not known yet, in one call."""
        new = list(set(token_ids) - self._texts.keys())
        if not new:
            return
        # Some tokenizers drop the space that a text begins with: what a token adds after itself keeps it.
        pairs: list[Sequence[int]] = [ids for token_id in new for ids in ((token_id,), (token_id, token_id))]
        decoded = self._decode(pairs, skip_special_tokens=False)
        for token_id, once, twice in zip(new, decoded[::2], decoded[1::2], strict=True):
            self._texts[token_id] = as_unicode(twice[len(once) :] or once)

    def __getitem__(self, token_id: int) -> str:
        return self._texts[token_id]


def column_value(
    entries: Sequence[TokenLogprob | None] | None, texts: TokenTexts
) -> list[dict[str, Any] | None] | None:
    """A row's value, an entry per token: {token_id, token, logprob, top: [{token_id, token, logprob}]}."""
    if entries is None:
        return None
    texts.learn(token_id for entry in entries if entry is not None for token_id in _token_ids(entry))
    return [None if entry is None else _with_text(entry, texts) for entry in entries]


def _token_ids(entry: TokenLogprob) -> list[int]:
    return [entry.token_id, *(token_id for token_id, _ in entry.top)]


def _with_text(entry: TokenLogprob, texts: TokenTexts) -> dict[str, Any]:
    top = [_pair(token_id, logprob, texts) for token_id, logprob in entry.top]
    return {**_pair(entry.token_id, entry.logprob, texts), "top": top}


def _pair(token_id: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    return {"token_id": token_id, "token": texts[token_id], "logprob": logprob}
