"""fp8 by a table of all its numbers, written without torch's conversions: what rounding and quantizing must give."""

from __future__ import annotations

import torch

LARGEST = 448.0


def all_numbers() -> torch.Tensor:
    """The finite numbers of E4M3 from 0 up, float64 [127], in the order of their bytes."""
    fraction = torch.arange(8, dtype=torch.float64) / 8
    subnormal = fraction * 2.0**-6
    normal = [(1 + fraction) * 2.0 ** (exponent - 7) for exponent in range(1, 16)]
    return torch.cat((subnormal, *normal))[:-1]  # the last pattern is NaN


def rounded(x: torch.Tensor) -> torch.Tensor:
    """The nearest number of the format, in float64; of two the one of the even byte. Saturates; NaN stays."""
    numbers = all_numbers()
    magnitude = x.double().abs().clamp(max=LARGEST).contiguous()
    above = torch.searchsorted(numbers, magnitude.nan_to_num(0.0)).clamp(max=len(numbers) - 1)
    below = (above - 1).clamp(min=0)
    to_above, to_below = numbers[above] - magnitude, magnitude - numbers[below]
    takes_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    nearest = torch.where(takes_above, numbers[above], numbers[below]) * x.double().sign()
    return torch.where(x.isnan(), torch.nan, nearest)


def fake_quantized(x: torch.Tensor) -> torch.Tensor:
    """x [..., C] with each row scaled to the format's range, rounded and scaled back, in x's dtype."""
    scale = x.float().abs().amax(-1, keepdim=True) / LARGEST
    scale = torch.where(scale == 0, 1.0, scale)
    return (rounded(x.float() / scale).float() * scale).to(x.dtype)


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, I], quantized first, times a weight [O, I] that is already: float64 [T, O]."""
    return fake_quantized(x.float()).double() @ weight.double().T
