"""Rotary position embedding, half-rotation layout: dimension i of a head turns with dimension i + R/2, R <= D."""

from __future__ import annotations

import torch


def rotary_cos_sin(
    positions_T: torch.Tensor, inv_freq: torch.Tensor, attention_scaling: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines of each token's angles, [T, 1, D] each, computed in float32 and rounded to `dtype`.

    positions_T: integers. inv_freq: float32 [D/2]. attention_scaling: YaRN's factor, 1.0 elsewhere. The sines of the
    first half are negated: that is how they enter the rotation.
    """
    angles = positions_T[:, None, None] * inv_freq
    cos, sin = angles.cos(), angles.sin()
    if attention_scaling != 1.0:  # on a GPU every call is a kernel in every step
        cos, sin = cos * attention_scaling, sin * attention_scaling
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def apply_rotary(x_TND: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn every head of every token by its position; x_TND: [T, N heads, D], any strides.

    cos, sin: [T, 1, R] from `rotary_cos_sin`. Where R < D, only the first R dimensions turn (dimension i with i + R/2).
    """
    rotary_dim = cos.shape[-1]
    if rotary_dim < x_TND.shape[-1]:
        turned_TNR = apply_rotary(x_TND[..., :rotary_dim], cos, sin)
        return torch.cat((turned_TNR, x_TND[..., rotary_dim:]), dim=-1)
    return (x_TND * cos).addcmul_(x_TND.roll(x_TND.shape[-1] // 2, dims=-1), sin)
