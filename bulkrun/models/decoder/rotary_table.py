"""Cosines and sines of a rotary embedding by position, kept on a CPU instead of being computed for every step.

A position's row has the same bits whenever it was computed: always in the same short piece, which no thread shares
with another. Knows no model and no layer.
"""

from __future__ import annotations

import torch

from bulkrun import ops

_PIECE = 128  # positions computed at once: too few for torch to divide among threads
_MIN_POSITIONS = 1024


class RotaryTable:
    """One embedding's table; it grows with the longest context seen, to at most twice as many positions."""

    def __init__(self, inv_freq: torch.Tensor, attention_factor: float, dtype: torch.dtype) -> None:
        self._inv_freq = inv_freq
        self._attention_factor = attention_factor
        self._dtype = dtype
        self._cos_P1R, self._sin_P1R = self._compute(_MIN_POSITIONS)

    def rows(self, positions_T: torch.Tensor, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What `ops.rotary_cos_sin` gives for positions that are all below `num_positions`: [T, 1, R] each."""
        if num_positions > self._cos_P1R.shape[0]:
            self._cos_P1R, self._sin_P1R = self._compute(1 << (num_positions - 1).bit_length())
        return self._cos_P1R.index_select(0, positions_T), self._sin_P1R.index_select(0, positions_T)

    def _compute(self, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        pieces = [
            ops.rotary_cos_sin(position_P, self._inv_freq, self._attention_factor, self._dtype)
            for position_P in torch.arange(num_positions, device=self._inv_freq.device).split(_PIECE)
        ]
        cos, sin = zip(*pieces, strict=True)
        return torch.cat(cos), torch.cat(sin)
