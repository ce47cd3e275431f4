"""The order of codes of four bits in a weight that a kernel unpacks: what a thread multiplies lies side by side.

Of 16 inputs the matrix units want from each thread of four the inputs 2 t and 2 t + 1, as halves of a register, and
those 8 further. So 64 inputs are eight words of 32 bits, two of them, which one load takes, to a thread; and codes of
neighbors lie 16 bits apart, so that a shift and a mask give both halves.
"""

from __future__ import annotations

import torch

BLOCK = 64  # inputs, among which codes change places
_IN_LINE = (2, 2, 2, 4, 2)  # an input's number: the word of a thread, 16 of it, 8 of these, the thread, the neighbor
_TO_WORDS = (3, 0, 4, 1, 2)  # the thread, its word, the neighbor, 16, 8
_IN_WORDS = tuple(_IN_LINE[place] for place in _TO_WORDS)
_TO_LINE = tuple(_TO_WORDS.index(place) for place in range(len(_IN_LINE)))
_PIECE_BYTES = 2**24  # whose codes change places at a time


def in_words(codes: torch.Tensor) -> torch.Tensor:
    """A copy in the order for a kernel; uint8 [..., I / 2], two codes to a byte, I a multiple of `BLOCK`."""
    rows = codes.flatten(0, -2)
    ordered, step = torch.empty_like(rows), max(1, _PIECE_BYTES // max(1, rows.shape[1]))
    for first in range(0, len(rows), step):
        ordered[first : first + step] = _reordered(rows[first : first + step], _IN_LINE, _TO_WORDS)
    return ordered.view(codes.shape)


def in_line(codes: torch.Tensor) -> torch.Tensor:
    """The way back: the first input's code in the low bits of the first byte."""
    return _reordered(codes, _IN_WORDS, _TO_LINE)


def _reordered(codes: torch.Tensor, sizes: tuple[int, ...], order: tuple[int, ...]) -> torch.Tensor:
    each = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).unflatten(-1, (-1, *sizes))
    kept = each.ndim - len(sizes)
    moved = each.permute(*range(kept), *(kept + place for place in order)).flatten(kept - 1)
    return moved[..., ::2] | moved[..., 1::2] << 4
