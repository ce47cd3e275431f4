"""The kinds of weights that there are products for, and what they have in common. Knows no product."""

from __future__ import annotations

import torch

from bulkrun.ops.matmul.four_bit_weight import FourBitWeight
from bulkrun.ops.matmul.fp8_linear import Fp8Weight
from bulkrun.ops.matmul.int8_linear import Int8Weight
from bulkrun.ops.matmul.unpack_codes import CODES_PER_BYTE

AnyWeight = torch.Tensor | Int8Weight | Fp8Weight | FourBitWeight  # [O, I], of experts [X, O, I], or in panels


def values_of(weight: AnyWeight) -> torch.Tensor:
    """The numbers alone, or their codes, as they lie."""
    if isinstance(weight, torch.Tensor):
        return weight
    return weight.codes if isinstance(weight, FourBitWeight) else weight.values


def numbers_per_item(weight: AnyWeight) -> int:
    """How many numbers each of the values holds."""
    return CODES_PER_BYTE if isinstance(weight, FourBitWeight) else 1
