"""Experts whose weights are plain numbers: pairs of token and expert sorted by expert, through torch's grouped product,
which reads the weights of the experts that were chosen, each once. Knows no model.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bulkrun.ops.dispatch import by_device
from bulkrun.ops.experts.expert_pairs import ExpertActivation, ExpertPairs, gated
from bulkrun.ops.experts.expert_pairs import sum_by_token as _sum_by_token

_grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm  # torch 2.9 has it by the second name only
sum_by_token = by_device(_sum_by_token)


def grouped_experts(
    x_TE: torch.Tensor,
    gate_up_XIE: torch.Tensor,
    down_XEI: torch.Tensor,
    weights_Tk: torch.Tensor,
    ids_Tk: torch.Tensor,
    biases: tuple[torch.Tensor, torch.Tensor] | None,
    activation: ExpertActivation,
) -> torch.Tensor:
    """`ops.fused_experts` with such weights, of sizes that are multiples of 8, which torch asks for."""
    pairs = ExpertPairs.of(ids_Tk, len(gate_up_XIE))
    gate_up_PI = _grouped_mm(x_TE[pairs.token_P], gate_up_XIE.transpose(1, 2), offs=pairs.ends_X)
    if biases is not None:
        gate_up_PI += biases[0][ids_Tk.flatten()[pairs.order_P]]
    down_PE = _grouped_mm(gated(gate_up_PI, activation), down_XEI.transpose(1, 2), offs=pairs.ends_X)
    if biases is not None:
        down_PE += biases[1][ids_Tk.flatten()[pairs.order_P]]
    return sum_by_token(down_PE, pairs.order_P, weights_Tk)
