"""Matrix products with weights of four bits, as they are stored (`unpack_codes`).

This is the contract and the pure-torch reference: numbers are computed in float32 and rounded once, to the dtype of
what they are multiplied with, or to int8 with a scale per output channel, as if such a weight had been quantized anew
(`int8_linear`). On a GPU they are unpacked before every product: a model that fits no other way runs. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import NamedTuple

import torch
import torch.nn.functional as F

from bulkrun.ops.dispatch import by_device
from bulkrun.ops.int8_linear import ZERO, Int8Weight, int8_factor, int8_linear, to_int8
from bulkrun.ops.unpack_codes import unpack_codes as _unpack_codes

unpack_codes = by_device(_unpack_codes)
_ROWS_AT_A_TIME = 256


class Int8Rounding(NamedTuple):
    """How the numbers of a weight [O, I] become int8, for products with rows of int8."""

    factor: torch.Tensor  # float32 [O]: a number times so much is rounded
    scale: torch.Tensor  # float32 [O, 1]: one of int8 stands for so much
    zeros: torch.Tensor  # int32 [O], as an Int8Weight's


class FourBitWeight(NamedTuple):
    """A weight [O, I], or weights [X, O, I], of codes; in panels, see `cpu.four_bit_linear`."""

    codes: torch.Tensor  # uint8 [O, I / 2], two to a byte, the first in its low bits
    scale: torch.Tensor  # float32 or bfloat16 [O, groups]
    zero: torch.Tensor | None  # uint8 [O, groups]; None: zeros
    codebook: torch.Tensor  # float32 [16]
    int8: Int8Rounding | None = None  # where products are to be in int8

    def each(self, choose: Callable[[torch.Tensor], torch.Tensor]) -> FourBitWeight:
        """With what is chosen of codes, scales and zero points."""
        zero = None if self.zero is None else choose(self.zero)
        return self._replace(codes=choose(self.codes), scale=choose(self.scale), zero=zero)


def unpack(weight: FourBitWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The numbers of a plain weight: [..., O, I]."""
    return unpack_codes(weight.codes, weight.scale, weight.zero, weight.codebook, dtype)


def with_int8(weight: FourBitWeight) -> FourBitWeight:
    """A plain weight for products in int8. Its codes stay."""
    rows = weight.each(lambda part: part.flatten(0, -2))
    pieces = [slice(first, first + _ROWS_AT_A_TIME) for first in range(0, len(rows.codes), _ROWS_AT_A_TIME)]
    parts = [_rounding(unpack(rows.each(itemgetter(piece)))) for piece in pieces]
    outputs = weight.codes.shape[:-1]
    factor, scales, zeros = (torch.cat(part) for part in zip(*parts, strict=True))
    return weight._replace(
        int8=Int8Rounding(factor.view(outputs), scales.view(*outputs, 1), zeros.view(outputs).contiguous())
    )


def four_bit_linear(x: torch.Tensor, weight: FourBitWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """`x @ weight.T + bias`; x: [T, I]; weight: plain; bias: [O] or None; returns [T, O] in x's dtype."""
    if weight.int8 is None:
        return F.linear(x, unpack(weight, x.dtype), bias)
    values = to_int8(unpack(weight), weight.int8.factor.unsqueeze(-1))
    return int8_linear(x, Int8Weight(values, weight.int8.scale), bias)


def four_bits_of_expert(weight_XOI: FourBitWeight, expert: int) -> FourBitWeight:
    """An expert's matrix [O, I] of plain weights."""
    int8 = None if weight_XOI.int8 is None else Int8Rounding(*(part[expert] for part in weight_XOI.int8))
    return weight_XOI.each(itemgetter(expert))._replace(int8=int8)


def _rounding(numbers: torch.Tensor) -> Int8Rounding:
    factor, scale = int8_factor(numbers)
    sums = to_int8(numbers, factor).sum(-1, dtype=torch.int32)
    return Int8Rounding(factor.squeeze(-1), scale, sums * ZERO)
