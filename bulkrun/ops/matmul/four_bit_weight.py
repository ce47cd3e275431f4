"""A weight of four bits, the forms in which it is held, and the numbers that it stands for (`unpack_codes`).

Knows no product and no model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Literal, NamedTuple

import torch

from bulkrun.ops.dispatch import by_device
from bulkrun.ops.matmul.four_bit_order import BLOCK, in_words
from bulkrun.ops.matmul.unpack_codes import CODES_PER_BYTE
from bulkrun.ops.matmul.unpack_codes import unpack_codes as _unpack_codes

unpack_codes = by_device(_unpack_codes)
TILE_INPUTS = (64, 128)  # of a kernel that unpacks
WHOLE_NUMBERS = tuple(float(code) for code in range(16))
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_MAGNITUDES, *(-number for number in _MAGNITUDES))
_ZERO_BITS = 15  # of a float32, which numbers of 16 bits leave free
SHIFTED_SCALES = {torch.bfloat16: 2.0**6, torch.float16: 2.0**9}  # a kernel multiplies in such a dtype by so much more
_EXPONENT_BIAS, _MOST_EXPONENT = 127, 128  # of a scale; 2 ** 126 times one with a higher one is no float32


class Int8Rounding(NamedTuple):
    """How the numbers of a weight [O, I] become int8, for products with rows of int8."""

    factor: torch.Tensor  # float32 [O]: a number times so much is rounded
    scale: torch.Tensor  # float32 [O, 1]: one of int8 stands for so much
    zeros: torch.Tensor  # int32 [O], as an Int8Weight's


class FourBitWeight(NamedTuple):
    """A weight [O, I], or weights [X, O, I], of codes; in panels, see `cpu.four_bit_linear`."""

    codes: torch.Tensor  # uint8 [O, I / 2], two to a byte, the first in its low bits; see `in_bits` for other forms
    scale: torch.Tensor  # float32 or bfloat16 [O, groups]; in other forms than "table", see `in_bits`
    zero: torch.Tensor | None  # uint8 [O, groups]; None: zeros, or in the scale
    codebook: torch.Tensor  # float32 [16]
    int8: Int8Rounding | None = None  # where products are to be in int8
    form: Literal["table", "whole", "e2m1"] = "table"  # how a code tells its number: by the codebook, or in its bits
    exact_in: tuple[torch.dtype, ...] = ()  # dtypes of 16 bits in which a kernel may compute, for nothing is lost

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return self.codes.shape[-1] * CODES_PER_BYTE // self.scale.shape[-1]

    def each(self, choose: Callable[[torch.Tensor], torch.Tensor]) -> FourBitWeight:
        """With what is chosen of codes, scales and zero points."""
        zero = None if self.zero is None else choose(self.zero)
        return self._replace(codes=choose(self.codes), scale=choose(self.scale), zero=zero)


def unpack(weight: FourBitWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The numbers of a plain weight: [..., O, I]."""
    scale, zero = weight.scale, weight.zero
    if weight.form == "whole":
        scale, zero = (scale & ~_ZERO_BITS).view(torch.float32), (scale & _ZERO_BITS).to(torch.uint8)
    if weight.form == "e2m1":
        scale = ((scale.int() + 1) << 23).view(torch.float32) * 0.5  # the lowest is no normal number
    return unpack_codes(weight.codes, scale, zero, weight.codebook, dtype, are_in_words=weight.form != "table")


def in_bits(weight: FourBitWeight) -> FourBitWeight:
    """A plain weight in the form in which bits alone tell the number of a code, for a kernel; else itself.

    "whole": codes are their numbers, and scales are int32 [O, groups], the bits of a float32 with the zero point in the
    four low ones, which scales that were stored in 16 bits leave free. "e2m1": codes are a sign, an exponent and a bit
    as in any float, and scales are uint8 [O, groups], exponents of two plus 127, as MXFP4 stores them. Codes are a copy
    in the order of `four_bit_order`. A weight stays as it is where something would be lost, where inputs fill no blocks
    of that order, and where groups of them neither fill tiles of a kernel nor are filled by one.
    """
    codebook, group_size, has_many = tuple(weight.codebook.tolist()), weight.group_size, weight.scale.shape[-1] > 1
    if group_size * weight.scale.shape[-1] % BLOCK:
        return weight
    if has_many and group_size % max(TILE_INPUTS) and min(TILE_INPUTS) % group_size:
        return weight
    if codebook == E2M1 and weight.zero is None:
        return _in_e2m1(weight)
    return _in_whole_numbers(weight) if codebook == WHOLE_NUMBERS else weight


def _in_whole_numbers(weight: FourBitWeight) -> FourBitWeight:
    if weight.scale.dtype != torch.float32 or bool((weight.scale.view(torch.int32) & _ZERO_BITS).any()):
        return weight
    words, exact = weight.scale.view(torch.int32), tuple(filter(partial(_holds, weight.scale), SHIFTED_SCALES))
    words = words if weight.zero is None else words | weight.zero
    return weight._replace(codes=in_words(weight.codes), scale=words, zero=None, form="whole", exact_in=exact)


def _holds(scale: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the dtype has the scales that a kernel multiplies by in it."""
    shifted = scale * SHIFTED_SCALES[dtype]
    return bool(((shifted.to(dtype).float() == shifted) & shifted.to(dtype).isfinite()).all())


def _in_e2m1(weight: FourBitWeight) -> FourBitWeight:
    half, exponent = torch.frexp(weight.scale.float())
    exponent += _EXPONENT_BIAS - 1
    if bool((half != 0.5).any()) or bool(((exponent < 0) | (exponent > _MOST_EXPONENT)).any()):
        return weight
    scale, codes = exponent.to(torch.uint8), in_words(weight.codes)
    return weight._replace(codes=codes, scale=scale, form="e2m1", exact_in=(torch.bfloat16,))


def four_bits_of_expert(weight_XOI: FourBitWeight, expert: int) -> FourBitWeight:
    """An expert's matrix [O, I] of plain weights."""
    int8 = None if weight_XOI.int8 is None else Int8Rounding(*(part[expert] for part in weight_XOI.int8))
    return weight_XOI.each(itemgetter(expert))._replace(int8=int8)
