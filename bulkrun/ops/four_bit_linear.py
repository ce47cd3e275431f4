"""Matrix products with weights of four bits, as they are stored (`unpack_codes`).

This is the contract and the pure-torch reference: numbers are computed in float32 and rounded once, to the dtype of
what they are multiplied with, or to int8 with a scale per output channel, as if such a weight had been quantized anew
(`int8_linear`). On a GPU a kernel unpacks them in registers, where codes tell their numbers (`in_bits`) and rows are
few; else they are unpacked before the product. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from bulkrun.ops.dispatch import by_device
from bulkrun.ops.int8_linear import ZERO, Int8Weight, int8_factor, int8_linear, to_int8
from bulkrun.ops.unpack_codes import CODES_PER_BYTE
from bulkrun.ops.unpack_codes import unpack_codes as _unpack_codes

unpack_codes = by_device(_unpack_codes)
_ROWS_AT_A_TIME = 256
_ZERO_BITS = 15
TILE_INPUTS = (64, 128)  # of a kernel
_E2M1_SCALES = 4.0  # below which 2 ** 126 of them are a float32
WHOLE_NUMBERS = tuple(float(code) for code in range(16))
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_MAGNITUDES, *(-number for number in _MAGNITUDES))


class Int8Rounding(NamedTuple):
    """How the numbers of a weight [O, I] become int8, for products with rows of int8."""

    factor: torch.Tensor  # float32 [O]: a number times so much is rounded
    scale: torch.Tensor  # float32 [O, 1]: one of int8 stands for so much
    zeros: torch.Tensor  # int32 [O], as an Int8Weight's


class FourBitWeight(NamedTuple):
    """A weight [O, I], or weights [X, O, I], of codes; in panels, see `cpu.four_bit_linear`."""

    codes: torch.Tensor  # uint8 [O, I / 2], two to a byte, the first in its low bits
    scale: torch.Tensor  # float32 or bfloat16 [O, groups]; int32 in the form "whole", with zero points in it
    zero: torch.Tensor | None  # uint8 [O, groups]; None: zeros, or in the scale
    codebook: torch.Tensor  # float32 [16]
    int8: Int8Rounding | None = None  # where products are to be in int8
    form: Literal["table", "whole", "e2m1"] = (
        "table"  # how a code tells its number: by the codebook alone, or `in_bits`
    )

    def each(self, choose: Callable[[torch.Tensor], torch.Tensor]) -> FourBitWeight:
        """With what is chosen of codes, scales and zero points."""
        zero = None if self.zero is None else choose(self.zero)
        return self._replace(codes=choose(self.codes), scale=choose(self.scale), zero=zero)


def unpack(weight: FourBitWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The numbers of a plain weight: [..., O, I]."""
    scale, zero = weight.scale, weight.zero
    if weight.form == "whole":
        scale, zero = (scale & ~_ZERO_BITS).view(torch.float32), (scale & _ZERO_BITS).to(torch.uint8)
    return unpack_codes(weight.codes, scale, zero, weight.codebook, dtype)


def in_bits(weight: FourBitWeight) -> FourBitWeight:
    """A plain weight in the form in which bits alone tell the number of a code, for a kernel; else itself.

    Whole numbers from zero on are what their codes say; zero points move into the four low bits of float32 scales,
    which scales that were stored in 16 bits leave free. E2M1 is a sign, an exponent and a bit as in any float, and its
    scale makes up for the exponent's bias. A weight stays as it is where something would be lost, and where groups of
    inputs neither fill tiles of a kernel nor are filled.
    """
    codebook, num_groups = tuple(weight.codebook.tolist()), weight.scale.shape[-1]
    group_size = weight.codes.shape[-1] * CODES_PER_BYTE // num_groups
    if num_groups > 1 and group_size % max(TILE_INPUTS) and min(TILE_INPUTS) % group_size:
        return weight
    if codebook == E2M1 and weight.zero is None and bool((weight.scale.abs() < _E2M1_SCALES).all()):
        return weight._replace(form="e2m1")
    if codebook != WHOLE_NUMBERS or weight.scale.dtype != torch.float32:
        return weight
    words = weight.scale.view(torch.int32)
    if bool((words & _ZERO_BITS).any()):
        return weight
    return weight._replace(scale=words if weight.zero is None else words | weight.zero, zero=None, form="whole")


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
