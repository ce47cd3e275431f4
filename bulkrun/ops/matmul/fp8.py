"""Eight-bit floating-point numbers (E4M3: four bits of exponent, three of fraction) and their conversions.

The format has no infinity: its largest number is 448, and what lies beyond saturates there. NaN stays NaN, so that a
row whose numbers are broken is still found. Knows no cache and no weights.
"""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
MIN_CAPABILITY = (8, 9)  # the first NVIDIA GPUs that convert and multiply this format


def to_fp8(x: torch.Tensor) -> torch.Tensor:
    """Each number rounded to the nearest of the format (ties to even), in x's shape; beyond +-448 it is +-448."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def raw_bytes(x: torch.Tensor) -> torch.Tensor:
    """An fp8 tensor as uint8, the same memory: torch copies bytes by index, but not fp8. Others as they are."""
    return x.view(torch.uint8) if x.dtype == FP8 else x


def can_multiply_fp8(device: torch.device) -> bool:
    """Whether ops over fp8 tensors run on this device: any CPU (by conversion), a GPU from MIN_CAPABILITY on."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= MIN_CAPABILITY
