"""Matrix products with int8 weights: one scale for each output channel, and one for each token, found when it comes.

This is the contract and the pure-torch reference. Integers are summed exactly, so a row's result depends on that row
and the weight alone. The scheme is that of LLM.int8() without its outliers (Dettmers et al. 2022). Knows no model.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

INT8_MAX = 127.0
ZERO = 128  # the byte of a compiled product's rows that stands for 0: processors multiply one side without a sign
_LEAST = 2.0**-100  # what a row's largest number is taken for, if it is less: 127 / it is finite


class Int8Weight(NamedTuple):
    """A weight [O, I] as int8 numbers times a scale per output channel."""

    values: torch.Tensor  # int8 [O, I], or panels of it (`cpu.int8_linear.pack_int8_`)
    scale: torch.Tensor  # float32 [O, 1]
    zeros: torch.Tensor | None = None  # int32 [O]: ZERO times the sum of a channel's values; where they are in panels


def quantize_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's numbers over its scale: int8 [R, C], contiguous, and float32 [R, 1], with `x ~ int8 * scale`.

    x: float [R, C]. A row's largest magnitude becomes 127, so an error is at most 1/254 of that. A row with a NaN or an
    infinity dequantizes to no numbers.
    """
    x_float = x.float()
    factor_R1, scale_R1 = int8_factor(x_float)
    return to_int8(x_float, factor_R1), scale_R1


def int8_factor(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What each row's numbers are multiplied with before they are rounded, and their scale: float32 [..., 1].

    x: float32 [..., C].
    """
    most = x.abs().amax(-1, keepdim=True)
    most = torch.where(most < _LEAST, _LEAST, most)
    factor = most.new_tensor(INT8_MAX) / most  # of a number by a tensor torch makes a reciprocal first
    return factor, most / INT8_MAX


def to_int8(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """x times the factor, to the nearest whole number, as int8; what is no number becomes 0."""
    return (x * factor).round_().nan_to_num_(0.0).clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)


def int8_linear(x: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """`x @ (values * scale).T + bias` with x's rows rounded to int8 first; returns [T, O] in x's dtype.

    x: [T, I]. weight: plain, not in panels. bias: [O] or None. Sums are exact and scaled after the product.
    """
    x_int8, x_scale_T1 = quantize_int8(x)
    out_TO = (x_int8.double() @ weight.values.double().T).float().mul_(x_scale_T1).mul_(weight.scale.T)
    return (out_TO if bias is None else out_TO.add_(bias)).to(x.dtype)
