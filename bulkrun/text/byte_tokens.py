"""Tokens that stand for one byte (`<0xE6>`): what a vocabulary of characters writes all other characters with.

Llama 2, Mistral and Gemma have them. Their decoder takes a run of byte tokens as a whole: one byte that is not UTF-8,
such as the first of a character that max_tokens cut, turns the whole run into U+FFFD. Byte-level tokenizers lose that
character alone, and so do these when the wrong bytes are replaced before they are decoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import tokenizers

REPLACEMENT = "\ufffd"


class ByteTokens:
    """The byte tokens of one vocabulary: `byte_of` maps their ids to the bytes."""

    def __init__(self, byte_of: Mapping[int, int]) -> None:
        self._byte_of = dict(byte_of)
        self._id_of = {byte: token_id for token_id, byte in byte_of.items()}

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> ByteTokens | None:
        """The tokens that the tokenizer decodes as bytes, or None if it has no byte tokens."""
        found = ((backend.token_to_id(f"<0x{byte:02X}>"), byte) for byte in range(256))
        byte_of = {token_id: byte for token_id, byte in found if token_id is not None}
        letters = [token_id for token_id, byte in byte_of.items() if byte == ord("a")]
        return cls(byte_of) if len(byte_of) == 256 and backend.decode(letters) == "a" else None

    def mended(self, token_ids: Sequence[int]) -> list[int]:
        """The tokens with U+FFFD in place of bytes that are not valid UTF-8, so that all others keep their text."""
        mended: list[int] = []
        for is_bytes, group in groupby(token_ids, self._byte_of.__contains__):
            run = list(group)
            mended += self._valid(run) if is_bytes else run
        return mended

    def _valid(self, run: Sequence[int]) -> list[int]:
        text = bytes(map(self._byte_of.__getitem__, run)).decode(errors="replace")
        return [self._id_of[byte] for byte in text.encode()]
