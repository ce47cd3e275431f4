"""Matrix products with fp8 weights: one scale for each output channel, and one for each token, found when it comes.

This is the contract and the pure-torch reference, which multiplies in float32: on a CPU the same numbers as on a GPU,
for checks and not for speed. The scheme is vLLM's `fp8` with per-token activations (rows scaled by their largest
number, as in LLM.int8(), Dettmers et al. 2022). Knows no model.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from bulkrun.ops.matmul.fp8 import FP8_MAX, to_fp8

_LEAST_SCALE = torch.finfo(torch.float32).tiny  # of a row of zeros: anything finite will do


class Fp8Weight(NamedTuple):
    """A weight [O, I] as fp8 numbers times a scale per output channel; of experts [X, O, I] and [X, O, 1]."""

    values: torch.Tensor
    scale: torch.Tensor  # float32


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's numbers over its scale: fp8 [R, C], contiguous, and float32 [R, 1], with `x ~ fp8 * scale`.

    x: float [R, C]. A row's largest number becomes the format's (448), so an error is at most 1/16 of the number, or
    2^-10 / 448 of the row's largest where that is more. A row with a NaN or an infinity dequantizes to NaN there.
    """
    x_float = x.float()
    largest_R1 = x_float.abs().amax(-1, keepdim=True)
    # by a tensor: by a number a GPU multiplies with its reciprocal, which is no division to the last bit
    scale_R1 = (largest_R1 / torch.full_like(largest_R1, FP8_MAX)).clamp_min_(_LEAST_SCALE)
    return to_fp8(x_float / scale_R1), scale_R1


def fp8_linear(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`x @ (weight * weight_scale).T + bias` with x's rows rounded to fp8 first; returns [T, O] in x's dtype.

    x: [T, I]. weight: fp8 [O, I]. weight_scale: float32 [O, 1]. bias: [O] or None. Sums are float32 and scaled
    after the product.
    """
    x_fp8, x_scale_T1 = quantize_rows(x)
    out_TO = (x_fp8.float() @ weight.float().T).mul_(x_scale_T1).mul_(weight_scale.T)
    return (out_TO if bias is None else out_TO.add_(bias)).to(x.dtype)
