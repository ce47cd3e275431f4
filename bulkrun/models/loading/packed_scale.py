"""What the numbers of a packed weight stand for: (number - zero point) * scale.

The weight is dequantized as it is read, rows at a time, in float32; then it is rounded once to the model's dtype, or
quantized anew. Where the numbers lie in a word: `packed_words`. Knows no checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from bulkrun.models.config.packed_quantization import PackedQuantization
from bulkrun.models.loading.packed_words import codes_of_rows, numbers_of_rows, zero_points
from bulkrun.models.loading.stored_quantized import store_dequantized
from bulkrun.models.loading.target import Target

_PIECE_NUMBERS = 2**20  # dequantized at a time
_ROWS = 8  # and as many rows, or a multiple: the outputs in one of AWQ's words


class PackedScale(NamedTuple):
    """What the numbers of a weight [O, I] are dequantized with, as it is stored."""

    packing: PackedQuantization
    shape: tuple[int, int]
    scales: torch.Tensor
    zeros: torch.Tensor | None  # None: numbers lie around the middle of their range
    groups: torch.Tensor | None  # int64 [I], of each input; None: one after the other

    def store(self, words: torch.Tensor, target: Target) -> None:
        """Dequantize a weight, given its words, to where it belongs, or keep it as it is where that is its place."""
        if target.takes_codes:
            self._store_codes(words, target)
            return
        store_dequantized(self._dequantized(words.to(target.view.device, non_blocking=True)), target)

    def _store_codes(self, words: torch.Tensor, target: Target) -> None:
        for rows in self._pieces():
            codes = codes_of_rows(words, rows, self.packing.layout, self.packing.num_bits)
            target.view[rows].copy_(codes[:, : self.shape[1] // 2])
        scales = self._scales(words.device).expand(self.shape[0], -1)
        target.store_scales(scales, self._zeros(words.device).expand_as(scales))

    def _dequantized(self, words: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """The weight in float32, some rows at a time."""
        num_rows, num_columns = self.shape
        scales = self._scales(words.device).expand(num_rows, -1)
        zeros = self._zeros(words.device).expand_as(scales)
        groups = None if self.groups is None else self.groups.to(words.device)
        for rows in self._pieces():
            piece = numbers_of_rows(words, rows, self.packing.layout, self.packing.num_bits)[:, :num_columns].float()
            if groups is None:
                grouped = piece.view(len(piece), scales.shape[1], -1)
                grouped.sub_(zeros[rows, :, None]).mul_(scales[rows, :, None])
            else:
                piece.sub_(zeros[rows][:, groups]).mul_(scales[rows][:, groups])
            yield rows, piece

    def _pieces(self) -> Iterator[slice]:
        """Rows that are worked on together."""
        num_rows, num_columns = self.shape
        step = max(1, _PIECE_NUMBERS // (_ROWS * num_columns)) * _ROWS
        for first in range(0, num_rows, step):
            yield slice(first, min(first + step, num_rows))

    def _scales(self, device: torch.device) -> torch.Tensor:
        """float32 [O, groups], or [1, 1]."""
        scales = self.scales.to(device).float()
        return _as_grid(scales, self.shape) if self.packing.layout == "compressed" else scales.T.contiguous()

    def _zeros(self, device: torch.device) -> torch.Tensor:
        """float32 [O, groups], or [1, 1]."""
        middle = 2 ** (self.packing.num_bits - 1)
        if self.zeros is None:
            return torch.full((1, 1), float(middle), device=device)
        zeros = self.zeros.to(device)
        if zeros.dtype == torch.int8:  # around zero, as compressed-tensors wrote them before it packed them
            return _as_grid(zeros.float() + middle, self.shape)
        numbers = zero_points(zeros, self.packing.layout, self.packing.num_bits)[: self.shape[0]]
        return (numbers + self.packing.zero_offset & 2 * middle - 1).float().contiguous()


def _as_grid(tensor: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """[O, groups], or [1, 1] where one is for all."""
    return tensor.reshape(1, 1) if tensor.numel() == 1 else tensor.reshape(shape[0], -1)
