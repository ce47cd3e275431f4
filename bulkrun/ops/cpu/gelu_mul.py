"""The gated activation of the Gemma family's MLP, compiled. Contract: `ops.gelu_mul`."""

from __future__ import annotations

import torch

from bulkrun.ops.cpu.gate import gate
from bulkrun.ops.gelu_mul import gelu_mul as reference


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As the reference."""
    out = gate("gelu_mul", gate_up)
    return reference(gate_up) if out is None else out
