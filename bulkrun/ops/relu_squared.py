"""The activation of MLPs without gates (Nemotron): the square of what is above zero."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """`max(x, 0)^2` in x's dtype, on any device."""
    return F.relu(x).square_()
