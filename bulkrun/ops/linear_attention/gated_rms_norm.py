"""Root-mean-square normalization of what a gate is multiplied with, before or after that."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    norm_before_gate: bool = True,
    silu: bool = True,
) -> torch.Tensor:
    """`norm(x) * weight * silu(gate)`, or `norm(x * silu(gate)) * weight` without `norm_before_gate` (Mamba 2).

    x: contiguous. gate: as x, any stride between tokens. weight: [E], or [H, E] with one for each group, of x's dtype.
    `norm(x) = x / sqrt(mean(x^2) + eps)` over the last dimension, [T, H, E] like x; its result is rounded to x's dtype
    before the weight is applied, and the product again before the gate is. silu: False has the gate's sigmoid instead.
    """
    number, factor = x.float(), F.silu(gate.float()) if silu else gate.float().sigmoid()
    if not norm_before_gate:
        number = number * factor
    scale = torch.rsqrt(number.square().mean(-1, keepdim=True).add_(eps))
    weighted = (number * scale).to(x.dtype) * weight
    return (weighted * factor).to(x.dtype) if norm_before_gate else weighted
