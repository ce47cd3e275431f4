"""Experts with weights of four bits on a GPU: both products of one kernel that unpacks in registers."""

from __future__ import annotations

import torch

from bulkrun.ops.experts.expert_pairs import ExpertActivation, ExpertPairs, gated
from bulkrun.ops.experts.four_bit_experts import four_bit_experts as reference
from bulkrun.ops.matmul.four_bit_weight import FourBitWeight
from bulkrun.ops.triton.expert_pairs import sum_by_token
from bulkrun.ops.triton.four_bit_product import ExpertRows, multiply


def four_bit_experts(
    x_TE: torch.Tensor,
    gate_up: FourBitWeight,
    down: FourBitWeight,
    weights_Tk: torch.Tensor,
    ids_Tk: torch.Tensor,
    biases: tuple[torch.Tensor, torch.Tensor] | None,
    activation: ExpertActivation,
) -> torch.Tensor:
    """As the reference, but for the order of sums."""
    if "table" in (gate_up.form, down.form):
        return reference(x_TE, gate_up, down, weights_Tk, ids_Tk, biases, activation)
    gate_up_bias, down_bias = biases or (None, None)
    pairs = ExpertPairs.of(ids_Tk, len(gate_up.codes))
    out_PO = x_TE.new_empty(len(pairs.order_P), gate_up.codes.shape[1])
    multiply(x_TE.contiguous(), gate_up, gate_up_bias, out_PO, ExpertRows(pairs.token_P, pairs.ends_X))
    out_PE = x_TE.new_empty(len(pairs.order_P), x_TE.shape[1])
    multiply(gated(out_PO, activation), down, down_bias, out_PE, ExpertRows(None, pairs.ends_X))
    return sum_by_token(out_PE, pairs.order_P, weights_Tk)
