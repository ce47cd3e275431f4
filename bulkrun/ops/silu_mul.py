"""The gated activation of the Llama family's MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`; gate_up: [..., 2 I], gate in the first half; returns [..., I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
