"""The gated activation of gpt-oss's experts in Triton."""

from __future__ import annotations

import torch

from bulkrun.ops.experts.clamped_swiglu import ClampedSwiglu
from bulkrun.ops.triton.silu_mul import gated_mul


def clamped_swiglu(gate_up: torch.Tensor, constants: ClampedSwiglu) -> torch.Tensor:
    """As the reference."""
    return gated_mul(gate_up, swiglu=constants)
