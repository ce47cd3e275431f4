"""Texts that show some special tokens: those that mark tool calls. Knows the tokenizer as a function.

Texts leave special tokens out, and a model may have the markers of its calls as such.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from bulkrun.job.outputs.output_text import Decode


class MarkerDecode:
    """Decodes as `decode` does, and shows the special tokens that are `markers`."""

    def __init__(self, decode: Decode, markers: Collection[str]) -> None:
        self._decode, self._markers = decode, frozenset(markers)
        self._is_left_out: dict[int, bool] = {}

    def __call__(self, sequences: list[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        if skip_special_tokens:
            self._learn(token_id for sequence in sequences for token_id in sequence)
            sequences = [[token for token in sequence if not self._is_left_out[token]] for sequence in sequences]
        return self._decode(sequences, skip_special_tokens=False)

    def _learn(self, token_ids: Iterable[int]) -> None:
        """Find out which new tokens are special: those whose text shows only where it is asked for."""
        new = list(set(token_ids) - self._is_left_out.keys())
        alone: list[Sequence[int]] = [[token_id] for token_id in new]
        whole = self._decode(alone, skip_special_tokens=False) if new else []
        shown = self._decode(alone) if new else []
        for token_id, name, text in zip(new, whole, shown, strict=True):
            self._is_left_out[token_id] = not text and bool(name.strip()) and name.strip() not in self._markers
