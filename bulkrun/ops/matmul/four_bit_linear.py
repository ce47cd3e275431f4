"""Matrix products with weights of four bits, as they are stored (`four_bit_weight`).

This is the contract and the pure-torch reference: numbers are computed in float32 and rounded once, to the dtype of
what they are multiplied with, or to int8 with a scale per output channel, as if such a weight had been quantized anew
(`int8_linear`). On a GPU a kernel unpacks them in registers, where codes tell their numbers (`in_bits`) and rows are
few; else they are unpacked before the product. Knows no model.
"""

from __future__ import annotations

from operator import itemgetter

import torch
import torch.nn.functional as F

from bulkrun.ops.matmul.four_bit_weight import FourBitWeight, Int8Rounding, unpack
from bulkrun.ops.matmul.int8_linear import ZERO, Int8Weight, int8_factor, int8_linear, to_int8

_ROWS_AT_A_TIME = 256


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


def _rounding(numbers: torch.Tensor) -> Int8Rounding:
    factor, scale = int8_factor(numbers)
    sums = to_int8(numbers, factor).sum(-1, dtype=torch.int32)
    return Int8Rounding(factor.squeeze(-1), scale, sums * ZERO)
