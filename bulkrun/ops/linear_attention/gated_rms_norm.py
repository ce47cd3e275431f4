"""Root-mean-square normalization whose result is multiplied by a gate."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight * silu(gate)` over the last dimension, [T, H, E] like x.

    x: contiguous. gate: as x, any stride between tokens. weight: [E], of x's dtype. What is normalized is rounded to
    that before the weight is applied, and the product again before the gate is.
    """
    x_float = x.float()
    scale = torch.rsqrt(x_float.square().mean(-1, keepdim=True).add_(eps))
    return ((x_float * scale).to(x.dtype) * weight * F.silu(gate.float())).to(x.dtype)
