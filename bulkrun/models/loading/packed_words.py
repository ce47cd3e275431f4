"""Numbers of 2, 3, 4 or 8 bits out of words of 32, in the orders of GPTQ, AWQ and compressed-tensors.

GPTQ packs along a weight's inputs (qweight [I/p, O]), compressed-tensors too (weight_packed [O, I/p]), AWQ along its
outputs (qweight [I, O/p]) and interleaved, as its kernel wants them: p numbers to a word, the first in the lowest bits.
Those of 3 bits go on in the next word: 32 lie in three.
"""

from __future__ import annotations

import torch

from bulkrun.models.config.packed_quantization import Layout

WORD_BITS = 32
CODE_BITS = 4
_AWQ_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight outputs lies in which place of a word


def numbers_of_rows(words: torch.Tensor, rows: slice, layout: Layout, num_bits: int) -> torch.Tensor:
    """The numbers of some outputs of a weight, uint8 [rows, I], or more columns where the last word is padded.

    With AWQ's layout `rows` begins and ends at words.
    """
    if layout == "gptq":
        return _unpacked(words[:, rows].T, num_bits)
    if layout == "compressed":
        return _unpacked(words[rows], num_bits)
    per_word = WORD_BITS // num_bits
    return _unpacked_awq(words[:, rows.start // per_word : rows.stop // per_word], num_bits)


def codes_of_rows(words: torch.Tensor, rows: slice, layout: Layout, num_bits: int) -> torch.Tensor:
    """The same, of four bits or fewer, two to a byte, the first in the low bits: uint8 [rows, I / 2], or more."""
    if num_bits == CODE_BITS and layout != "awq":
        of_rows = words[:, rows].T if layout == "gptq" else words[rows]
        return of_rows.contiguous().view(torch.uint8)
    numbers = numbers_of_rows(words, rows, layout, num_bits)
    return numbers[:, ::2] | numbers[:, 1::2] << CODE_BITS


def zero_points(words: torch.Tensor, layout: Layout, num_bits: int) -> torch.Tensor:
    """Zero points as they are stored, uint8 [O, groups], or more rows where the last word is padded.

    They are packed along the outputs: [groups, O/p], in compressed-tensors [O/p, groups].
    """
    if layout == "awq":
        return _unpacked_awq(words, num_bits)
    return _unpacked(words.T if layout == "compressed" else words, num_bits).T


def _unpacked(words: torch.Tensor, num_bits: int) -> torch.Tensor:
    """int32 [..., n] to uint8 [..., n * p]: by groups of bytes that hold whole numbers; words are little-endian."""
    in_order = torch.empty(words.shape, dtype=words.dtype, device=words.device).copy_(words)
    parts, mask = in_order.view(torch.uint8), 2**num_bits - 1
    if num_bits != 3:
        return torch.stack([parts >> shift & mask for shift in range(0, 8, num_bits)], -1).flatten(-2)
    low, middle, high = parts.int().unflatten(-1, (-1, 3)).unbind(-1)
    eight = low | middle << 8 | high << 16
    return torch.stack([(eight >> shift & mask).to(torch.uint8) for shift in range(0, 24, 3)], -1).flatten(-2)


def _unpacked_awq(words: torch.Tensor, num_bits: int) -> torch.Tensor:
    """int32 [n, words] to uint8 [words * p, n]: whole rows at a time, for words are turned sooner than numbers."""
    turned, mask = words.T.contiguous(), 2**num_bits - 1
    numbers = torch.empty(len(turned), len(_AWQ_ROWS), turned.shape[1], dtype=torch.uint8, device=words.device)
    for place, row in enumerate(_AWQ_ROWS):
        numbers[:, row] = turned >> num_bits * place & mask
    return numbers.flatten(0, 1)
