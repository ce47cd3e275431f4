"""Pairs of texts as one sequence of token ids, joined as the model's tokenizer joins them.

[CLS] a [SEP] b [SEP] for BERT, <s> a </s></s> b </s> for RoBERTa: the file's post-processor says it, as it does for
transformers' `text_pair`. Ids alone go through a plan and an engine. So a model that has a token type for second texts
must see in the ids where they begin: behind the first separator, which therefore must not come out of the texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tokenizers

from bulkrun.errors import ModelError
from bulkrun.request import RowError


class EncodedPair(NamedTuple):
    """A pair's ids, special tokens included; the second text's are `token_ids[start:end]`."""

    token_ids: list[int]
    start: int
    end: int


class PairEncoder:
    """Encodes pairs with a tokenizer that is for nothing else from now on: special tokens in texts are plain text.

    `separator`: behind the first token of this id a pair's tokens are of the second type; None where the tokenizer, or
    the model, gives all of them the same. Raises ModelError, without naming a file, where types are of another form.
    """

    def __init__(self, backend: tokenizers.Tokenizer, num_types: int | None = None) -> None:
        """num_types: of the model's tokens; None where its files are silent, and the engine has to see to it."""
        self._backend = backend
        backend.encode_special_tokens = True
        self.separator = None if num_types is not None and num_types < 2 else _separator(backend, num_types)

    def encode_batch(self, pairs: Sequence[tuple[str, str]]) -> list[EncodedPair | RowError]:
        """The ids of each pair, or why it has none. Releases the GIL.

        `empty_prompt`: a second text without tokens; `bad_input`: a separator in a first one, where types depend on it.
        """
        return [self._read(encoding) for encoding in self._backend.encode_batch_fast(list(pairs))]

    def _read(self, encoding: tokenizers.Encoding) -> EncodedPair | RowError:
        ids, texts = encoding.ids, encoding.sequence_ids
        if 1 not in texts:
            return RowError("empty_prompt", "the second text (text_pair) has no tokens")
        if self.separator is not None and texts[ids.index(self.separator)] is not None:
            return RowError(
                "bad_input",
                f"the first text holds {self._backend.id_to_token(self.separator)!r}, which this tokenizer cannot tell "
                "from the separator of the two texts; leave it out",
            )
        start = texts.index(1)
        return EncodedPair(ids, start, start + texts.count(1))


def _separator(backend: tokenizers.Tokenizer, num_types: int | None) -> int | None:
    """The token behind which types are 1, found with a pair of two letters."""
    pair = backend.encode("a", "b")
    if not any(pair.type_ids):
        return None
    border = pair.type_ids.count(0)
    separator = pair.ids[border - 1]
    is_of_two = border > 0 and pair.type_ids == [0] * border + [1] * (len(pair.ids) - border)
    if is_of_two and pair.special_tokens_mask[border - 1] and pair.ids.index(separator) == border - 1:
        return int(separator)
    if num_types is not None:
        raise ModelError(
            f"a pair of texts has token types {pair.type_ids}; supported are those that begin with the second text, "
            "behind a separator"
        )
    return None
