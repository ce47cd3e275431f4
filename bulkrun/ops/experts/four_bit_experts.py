"""Experts with weights of four bits: unpacked for torch's grouped product, which is the contract and the reference.

Knows no model.
"""

from __future__ import annotations

import torch

from bulkrun.ops.experts.expert_pairs import ExpertActivation
from bulkrun.ops.experts.grouped_experts import grouped_experts
from bulkrun.ops.matmul.four_bit_weight import FourBitWeight, unpack


def four_bit_experts(
    x_TE: torch.Tensor,
    gate_up: FourBitWeight,
    down: FourBitWeight,
    weights_Tk: torch.Tensor,
    ids_Tk: torch.Tensor,
    biases: tuple[torch.Tensor, torch.Tensor] | None,
    activation: ExpertActivation,
) -> torch.Tensor:
    """`ops.fused_experts` with such weights, plain ones; returns [T, E] in x's dtype.

    gate_up: [X, 2 I, E], down: [X, E, I]. Numbers are rounded to x's dtype, as is what gates and ups make.
    """
    both = unpack(gate_up, x_TE.dtype), unpack(down, x_TE.dtype)
    return grouped_experts(x_TE, *both, weights_Tk, ids_Tk, biases, activation)
