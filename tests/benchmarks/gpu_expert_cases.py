"""A mixture's experts in fp8 beside the same ones in bfloat16, at the tokens of steps.

Predicted for an H200, not measured: at 512 tokens both read every expert once (1.6 GB in bfloat16), so fp8 takes 0.55
of the time; at 4096 both multiply, and what sorts, gates and sums is the same, so it takes 0.70; at 64 tokens 0.60, as
launches begin to count.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from bulkrun import ops
from bulkrun.launch.bench.op_costs import experts_cost
from tests.benchmarks.gpu_case import BYTES, Case, Sizes


def expert_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    """Tokens spread over experts by chance."""
    num_experts, top_k, width = sizes.experts
    shapes = (num_experts, 2 * width, width), (num_experts, width, width)
    plain = [torch.randn(shape, device=device, dtype=torch.bfloat16) / width**0.5 for shape in shapes]
    fp8 = [quantized(weight) for weight in plain]
    for rows in dict.fromkeys((min(sizes.rows), sizes.decode_seqs, sizes.num_tokens)):
        x = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
        routed = ops.route_top_k(torch.randn(rows, num_experts, device=device), top_k, renormalize=True)
        cost = experts_cost(
            rows, num_experts=num_experts, experts_per_tok=top_k, expert_weights=3 * width**2, itemsize=1
        )
        yield Case(
            f"fp8_experts T={rows}",
            partial(ops.fused_experts, x, *fp8, *routed),
            num_bytes=cost.num_bytes + 2 * BYTES * x.numel(),
            flops=cost.flops,
            rival=partial(ops.fused_experts, x, *plain, *routed),
        )


def quantized(weight_XOI: torch.Tensor) -> ops.Fp8Weight:
    """A weight of experts, with a scale per output channel."""
    values, scale = ops.quantize_rows(weight_XOI.flatten(0, 1))
    return ops.Fp8Weight(values.view(weight_XOI.shape), scale.view(*weight_XOI.shape[:2], 1))
