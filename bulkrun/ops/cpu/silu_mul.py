"""The gated activation of the Llama family's MLP, compiled. Contract: `ops.silu_mul`."""

from __future__ import annotations

import torch

from bulkrun.ops.cpu.gate import gate
from bulkrun.ops.silu_mul import silu_mul as reference


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As the reference."""
    out = gate("silu_mul", gate_up)
    return reference(gate_up) if out is None else out
