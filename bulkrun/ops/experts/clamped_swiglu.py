"""The gated activation of gpt-oss's experts: SiLU with a slope, gates and ups within limits, ups plus one."""

from __future__ import annotations

from typing import NamedTuple

import torch


class ClampedSwiglu(NamedTuple):
    """Its constants."""

    alpha: float  # the slope: gate * sigmoid(alpha * gate)
    limit: float  # of gates above, of ups above and below


def clamped_swiglu(gate_up: torch.Tensor, constants: ClampedSwiglu) -> torch.Tensor:
    """`gate * sigmoid(alpha * gate) * (up + 1)` of clamped gates and ups, in float32, rounded once.

    gate_up: [..., 2 I], gate in the first half; returns [..., I]. As in OpenAI's gpt-oss, but for the interleaving.
    """
    alpha, limit = constants
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * (alpha * gate).sigmoid() * (up + 1)).to(gate_up.dtype)
