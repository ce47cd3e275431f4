"""The activation of Apertus, with two trained numbers: the integral of an ELU (Huang and Schlag, arXiv 2411.13010)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

BETA = 0.5  # the slope at zero
NEAREST = -1e-6  # to zero: where the exponential is taken at most


def xielu(x: torch.Tensor, alphas: torch.Tensor) -> torch.Tensor:
    """`p x^2 + x / 2` above zero and `n (exp(x) - 1 - x) + x / 2` below, in float32, rounded to x's dtype once.

    x: [T, I]. alphas: float32 [2], of which p is the first one's softplus, and n the second one's and 1/2 more.
    """
    (p, n), x_TI = factors(alphas), x.float()
    below_TI = (torch.expm1(x_TI.clamp(max=NEAREST)) - x_TI) * n
    return (torch.where(x_TI > 0, x_TI * x_TI * p, below_TI) + x_TI * BETA).to(x.dtype)


def factors(alphas: torch.Tensor) -> torch.Tensor:
    """p and n, float32 [2]."""
    return F.softplus(alphas) + alphas.new_tensor([0.0, BETA])
