"""Layer normalization of a sum: what a layer adds and what was there before, as encoders after BERT have it."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """The layer norm of `x + residual` over the last dimension, in x's dtype.

    x, residual: [T, E]; the sum is rounded to their dtype, mean and variance are taken in float32. weight, bias: [E].
    """
    return F.layer_norm(x + residual, x.shape[-1:], weight, bias, eps)
