"""The gated activation of the Gemma family's MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`gelu(gate) * up` with gelu's tanh approximation; gate_up: [..., 2 I], gate first; returns [..., I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)
