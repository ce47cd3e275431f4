"""Experts of fp8, expert by expert, beside a naive loop over experts in float64 with everything rounded by hand."""

from __future__ import annotations

import pytest
import torch

from bulkrun import ops
from bulkrun.ops.matmul.fp8_linear import Fp8Weight, quantize_rows
from tests.ops import fp8_oracle
from tests.ops.naive_experts import Weights, naive_experts, random_biases, random_weights, routed

# of the largest number that comes out: what gates and ups make may round to the neighbour, a sixteenth off, where a sum
# in another order has another last bit
TOLERANCE = {torch.float32: 4e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}


def quantized(weights: Weights) -> list[Fp8Weight]:
    rows = [quantize_rows(weight.flatten(0, 1)) for weight in weights]
    return [
        Fp8Weight(*(part.unflatten(0, weight.shape[:2]) for part in parts))
        for weight, parts in zip(weights, rows, strict=True)
    ]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("activation", [None, ops.ClampedSwiglu(1.702, 0.8), "relu2", "gelu_tanh"])
@pytest.mark.parametrize("has_biases", [False, True])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "num_tokens"), [(5, 2, 0), (5, 2, 1), (1, 1, 9), (3, 3, 33), (64, 8, 5), (9, 4, 150)]
)
def test_experts_equal_the_naive_loop(
    num_experts: int,
    top_k: int,
    num_tokens: int,
    has_biases: bool,
    activation: ops.ExpertActivation,
    dtype: torch.dtype,
) -> None:
    sizes, has_gates = (40, 23), activation != "relu2"
    weights, generator = random_weights(num_experts, sizes, has_gates=has_gates), torch.Generator().manual_seed(2)
    x_TE = torch.randn(num_tokens, sizes[0], generator=generator).to(dtype)
    biases = random_biases(num_experts, sizes, dtype, has_gates=has_gates) if has_biases else None
    weights_Tk, ids_Tk = routed(num_tokens, num_experts, top_k)
    ours = ops.fused_experts(x_TE, *quantized(weights), weights_Tk, ids_Tk, biases, activation)
    assert ours.dtype == dtype
    rounded = fp8_oracle.fake_quantized(weights[0]), fp8_oracle.fake_quantized(weights[1])
    exact = naive_experts(fp8_oracle.product, x_TE, rounded, weights_Tk, ids_Tk, biases, activation)
    size = exact.abs().max().item() if exact.numel() else 0.0
    torch.testing.assert_close(ours.double(), exact, atol=TOLERANCE[dtype] * size, rtol=0)


def test_a_row_that_is_no_numbers_gives_none_and_leaves_others_alone() -> None:
    fp8 = quantized(random_weights(4, (64, 64)))
    x_TE, asked = torch.randn(20, 64), routed(20, 4, 2)
    whole = ops.fused_experts(x_TE, *fp8, *asked)
    x_TE[7, 3] = torch.nan
    out = ops.fused_experts(x_TE, *fp8, *asked)
    others = [row for row in range(20) if row != 7]
    assert not out[7].isfinite().any()
    assert torch.equal(out[others], whole[others])


def test_both_weights_are_quantized_or_none() -> None:
    weights = random_weights(3, (8, 8))
    for gate_up, down in ((quantized(weights)[0], weights[1]), (weights[0], quantized(weights)[1])):
        with pytest.raises(AssertionError, match="both"):
            ops.fused_experts(torch.randn(2, 8), gate_up, down, *routed(2, 3, 2))


def test_they_stay_as_they_are_where_others_are_packed() -> None:
    for weight in quantized(random_weights(3, (64, 64))):
        assert not ops.are_packed(weight)
