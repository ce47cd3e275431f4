"""Experts with fp8 weights: both products as `fp8_linear` does them, a token rounded once for all of its experts.

This is the contract and the pure-torch reference, expert by expert: on a CPU the same numbers as on a GPU, for checks
and not for speed. Knows no model.
"""

from __future__ import annotations

import torch

from bulkrun.ops.experts.expert_pairs import ExpertActivation, quantized_experts
from bulkrun.ops.matmul.fp8_linear import Fp8Weight, fp8_linear


def fp8_experts(
    x_TE: torch.Tensor,
    gate_up: Fp8Weight,
    down: Fp8Weight,
    weights_Tk: torch.Tensor,
    ids_Tk: torch.Tensor,
    biases: tuple[torch.Tensor, torch.Tensor] | None,
    activation: ExpertActivation,
) -> torch.Tensor:
    """`ops.fused_experts` with such weights, of any sizes; returns [T, E] in x's dtype.

    gate_up: [X, 2 I, E], down: [X, E, I], a scale per expert and output channel. A token's row is rounded to fp8, what
    its gates and ups make is rounded to x's dtype and then to fp8 again. Sums are float32, scaled after the product.
    """
    return quantized_experts(_linear, x_TE, (gate_up, down), weights_Tk, ids_Tk, biases, activation)


def _linear(x: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    return fp8_linear(x, weight.values, weight.scale, bias)
