"""int8 by its definition, with sums of whole numbers: what quantizing and products must give."""

from __future__ import annotations

import torch


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers from -127 to 127, int64 [..., C], and each row's scale, float64 [..., 1].

    The factor is a float32, as the contract has it: else numbers half-way between two would go the other way.
    """
    most = x.float().abs().amax(-1, keepdim=True)
    most = torch.where(most == 0, 1.0, most)
    return (x.float() * torch.tensor(127.0).div(most)).round().long(), most.double() / 127


def fake_quantized(x: torch.Tensor) -> torch.Tensor:
    """x [..., C] with each row scaled to the range, rounded and scaled back, in x's dtype."""
    values, scale = quantized(x)
    return (values * scale).to(x.dtype)


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, I] times a weight [O, I], both quantized first: float64 [T, O]."""
    (x_values, x_scale), (values, scale) = quantized(x), quantized(weight)
    return (x_values @ values.T).double() * x_scale * scale.T
