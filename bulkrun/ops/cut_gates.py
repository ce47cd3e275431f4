"""Gates of which few are above zero: the largest, if they are spread like a normal distribution (Gemma 3n)."""

from __future__ import annotations

import torch


def cut_gates_(gate_TI: torch.Tensor, num_deviations: float) -> torch.Tensor:
    """Subtract from each row its mean and so many of its standard deviations; what is below zero becomes zero.

    gate_TI: [T, I], rows any number apart, written in place and returned; mean and deviation are taken in float32.
    """
    centered_TI = gate_TI.float()
    centered_TI = centered_TI - centered_TI.mean(-1, keepdim=True)
    deviation_T1 = centered_TI.square().mean(-1, keepdim=True).sqrt_()
    return gate_TI.copy_(centered_TI.sub_(deviation_T1.mul_(num_deviations)).relu_())
