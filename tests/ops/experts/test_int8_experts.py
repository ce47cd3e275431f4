"""Experts of int8, plain and in panels, beside a naive loop over tokens with sums of whole numbers."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from bulkrun import ops
from bulkrun.ops.cpu.fused_experts import can_pack_int8_experts
from bulkrun.ops.matmul.int8_linear import Int8Weight, quantize_int8
from tests.ops import int8_oracle
from tests.ops.naive_experts import Weights, naive_experts, random_biases, random_weights, routed

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# of the largest number that comes out: of what rounds to a neighbour on the way, and of the dtype itself
TOLERANCE = {torch.float32: 3e-3, torch.bfloat16: 1.5e-2, torch.float16: 1e-2}
LAST_BIT = {torch.float32: 1e-6, torch.bfloat16: 2**-7}  # of a sum over a token's experts


def quantized(weights: Weights) -> list[Int8Weight]:
    return [Int8Weight(*quantize_int8(weight)) for weight in weights]


def packed(weights: Weights) -> list[Int8Weight]:
    hidden, inner = weights[1].shape[1:]
    if not can_pack_int8_experts(ops.ExpertSizes(64, 64)):
        pytest.skip("panels of int8 need a compiler and AVX2")
    return [ops.pack_experts(weight, ops.ExpertSizes(hidden, inner)) for weight in quantized(weights)]


def assert_near(ours: torch.Tensor, exact: torch.Tensor) -> None:
    size = exact.abs().max().item() if exact.numel() else 0.0
    torch.testing.assert_close(ours.double(), exact, atol=TOLERANCE[ours.dtype] * size, rtol=0)


@each_dtype
@pytest.mark.parametrize(
    ("activation", "in_panels"),  # without gates there are none in panels
    [*product((None, ops.ClampedSwiglu(1.702, 0.8), "gelu_tanh"), (False, True)), ("relu2", False)],
)
@pytest.mark.parametrize("has_biases", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k", "num_tokens"), [(5, 2, 0), (5, 2, 1), (3, 3, 33), (9, 4, 150)])
def test_experts_equal_the_naive_loop(
    num_experts: int,
    top_k: int,
    num_tokens: int,
    has_biases: bool,
    activation: ops.ExpertActivation,
    in_panels: bool,
    dtype: torch.dtype,
) -> None:
    sizes, has_gates = (128, 192) if in_panels else (40, 24), activation != "relu2"
    weights = random_weights(num_experts, sizes, has_gates=has_gates)
    int8, generator = packed(weights) if in_panels else quantized(weights), torch.Generator().manual_seed(1)
    x_TE = torch.randn(num_tokens, sizes[0], generator=generator).to(dtype)
    biases = random_biases(num_experts, sizes, dtype, has_gates=has_gates) if has_biases else None
    weights_Tk, ids_Tk = routed(num_tokens, num_experts, top_k)
    ours = ops.fused_experts(x_TE, *int8, weights_Tk, ids_Tk, biases, activation)
    assert ours.dtype == dtype
    assert_near(ours, naive_experts(int8_oracle.product, x_TE, weights, weights_Tk, ids_Tk, biases, activation))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(64, 64), (64, 320), (448, 64)], ids=str)
def test_panels_give_what_the_reference_gives_and_the_bits_of_each_token_alone(
    sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    weights = random_weights(6, sizes)
    panels, plain = packed(weights), quantized(weights)
    for num_tokens in (1, 3, 17, 64, 129, 300, 700):
        x_TE = torch.randn(num_tokens, sizes[0]).to(dtype)
        weights_Tk, ids_Tk = routed(num_tokens, 6, 3)
        together = ops.fused_experts(x_TE, *panels, weights_Tk, ids_Tk)
        reference = ops.fused_experts(x_TE, *plain, weights_Tk, ids_Tk)
        torch.testing.assert_close(together, reference, atol=LAST_BIT[dtype], rtol=LAST_BIT[dtype])
        for token in range(0, num_tokens, 41):
            one = slice(token, token + 1)
            assert torch.equal(ops.fused_experts(x_TE[one], *panels, weights_Tk[one], ids_Tk[one]), together[one])


def test_panels_have_the_same_bits_on_any_number_of_threads() -> None:
    panels, before = packed(random_weights(6, (64, 128))), torch.get_num_threads()
    x_TE, results = torch.randn(70, 64), []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        results.append(ops.fused_experts(x_TE, *panels, *routed(70, 6, 2)))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("in_panels", [False, True])
def test_a_row_that_is_no_numbers_gives_none_and_leaves_others_alone(in_panels: bool) -> None:
    weights = random_weights(4, (64, 64))
    int8 = packed(weights) if in_panels else quantized(weights)
    x_TE, asked = torch.randn(20, 64), routed(20, 4, 2)
    whole = ops.fused_experts(x_TE, *int8, *asked)
    x_TE[7, 3] = torch.nan
    out = ops.fused_experts(x_TE, *int8, *asked)
    others = [row for row in range(20) if row != 7]
    assert not out[7].isfinite().any()
    assert torch.equal(out[others], whole[others])


@pytest.mark.parametrize("sizes", [(64, 96), (96, 64), (40, 24)], ids=str)
def test_experts_of_other_sizes_stay_plain(sizes: tuple[int, int]) -> None:
    for weight in quantized(random_weights(3, sizes)):
        assert ops.pack_experts(weight, ops.ExpertSizes(*sizes)) is weight
