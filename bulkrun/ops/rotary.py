"""Rotary position embedding, half-rotation layout: dimension i of a head turns with dimension i + D/2."""

from __future__ import annotations

import torch


def rotary_cos_sin(
    positions_T: torch.Tensor, inv_freq: torch.Tensor, attention_scaling: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of each token's angles, [T, 1, D/2] each, computed in float32 and rounded to `dtype`.

    positions_T: integers. inv_freq: float32 [D/2]. attention_scaling: YaRN's factor, 1.0 elsewhere.
    """
    angles = positions_T[:, None, None].float() * inv_freq
    return (angles.cos() * attention_scaling).to(dtype), (angles.sin() * attention_scaling).to(dtype)


def apply_rotary(x_TND: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn every head of every token by its position; x_TND: [T, N heads, D], any strides; cos, sin: [T, 1, D/2]."""
    first, second = x_TND.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
