"""Root-mean-square normalization, alone and fused with the residual addition before it."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, in x's dtype.

    x: [..., E], any strides. weight: anything that broadcasts against x. The mean is taken in float32 and the
    normalized value is rounded to the weight's dtype before the weight is applied: a float32 weight to a half-precision
    x is for models that round only once (Gemma, OLMo), a weight of x's dtype for those that round twice (Llama).
    """
    x_float = x.float()
    scale = torch.rsqrt(x_float.square().mean(-1, keepdim=True).add_(eps))
    return (x_float * scale).to(weight.dtype).mul_(weight).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add x to the residual stream and normalize the sum; returns (normed, new residual), both like x.

    scale: [1] in x's dtype, what the sum is multiplied by before; rounded to that dtype, as the sum is.
    """
    residual = x + residual if scale is None else (x + residual) * scale
    return rms_norm(residual, weight, eps), residual
