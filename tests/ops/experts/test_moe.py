"""Experts beside a naive loop over tokens and their experts, in float64."""

from __future__ import annotations

import pytest
import torch

from bulkrun import ops
from bulkrun.ops.cpu.panel_linear import can_pack_panels
from bulkrun.ops.experts.expert_pairs import ExpertPairs, sum_by_token
from bulkrun.ops.triton.expert_pairs import sum_by_token as triton_sum
from tests.ops.naive_experts import naive_experts as naive_loop


def naive_experts(
    x_TE: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights_Tk: torch.Tensor,
    ids_Tk: torch.Tensor,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    activation: ops.ExpertActivation = None,
) -> torch.Tensor:
    return naive_loop(exact_product, x_TE, (gate_up, down), weights_Tk, ids_Tk, biases, activation)


def exact_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.double() @ weight.double().T


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"), [(1, 4, 2), (17, 4, 1), (33, 7, 3), (5, 64, 8), (3, 3, 3)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", [None, "relu2", "gelu_tanh"])
def test_experts_equal_the_naive_loop(
    num_tokens: int, num_experts: int, top_k: int, activation: ops.ExpertActivation, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    x_TE = torch.randn(num_tokens, 24, generator=generator).to(dtype)
    num_ups = 16 if activation == "relu2" else 2 * 16
    gate_up = (torch.randn(num_experts, num_ups, 24, generator=generator) / 5).to(dtype)
    down = (torch.randn(num_experts, 24, 16, generator=generator) / 3).to(dtype)
    logits_TX = torch.randn(num_tokens, num_experts, generator=generator)
    weights_Tk, ids_Tk = ops.route_top_k(logits_TX, top_k, renormalize=True)
    ours = ops.fused_experts(x_TE, gate_up, down, weights_Tk, ids_Tk, None, activation)
    exact = naive_experts(x_TE, gate_up, down, weights_Tk, ids_Tk, None, activation)
    assert ours.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(ours.double(), exact, atol=tolerance, rtol=tolerance)


def test_no_tokens_give_no_rows() -> None:
    weights_Tk, ids_Tk = ops.route_top_k(torch.empty(0, 4), 2, renormalize=True)
    assert ops.fused_experts(torch.empty(0, 8), torch.ones(4, 8, 8), torch.ones(4, 8, 4), weights_Tk, ids_Tk).shape == (
        0,
        8,
    )


@pytest.mark.parametrize("renormalize", [False, True])
def test_routing_keeps_the_likeliest_experts_and_their_probabilities(renormalize: bool) -> None:
    probabilities = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.7, 0.1, 0.15, 0.05]])
    weights_Tk, ids_Tk = ops.route_top_k(probabilities.log(), 2, renormalize=renormalize)
    assert ids_Tk.tolist() == [[1, 3], [0, 2]]
    expected = torch.tensor([[0.4, 0.3], [0.7, 0.15]])
    torch.testing.assert_close(weights_Tk, expected / expected.sum(1, keepdim=True) if renormalize else expected)


def test_experts_get_their_tokens_in_order() -> None:
    pairs = ExpertPairs.of(torch.tensor([[3, 0], [1, 3], [0, 3]]), 5)
    assert pairs.token_P.tolist() == [0, 2, 1, 0, 1, 2]
    assert pairs.order_P.tolist() == [1, 4, 2, 0, 3, 5]
    assert pairs.ends_X.tolist() == [2, 3, 3, 6, 6]


@pytest.mark.parametrize("form", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "size"), [(0, 2, 8), (1, 1, 5), (7, 3, 1024), (12, 8, 1100), (30, 4, 2880)]
)
def test_a_tokens_experts_are_summed(num_tokens: int, top_k: int, size: int, dtype: torch.dtype, form: str) -> None:
    device = "cuda" if form == "triton" and torch.cuda.is_available() else "cpu"
    order_P = ExpertPairs.of(torch.rand(num_tokens, 9).topk(top_k).indices, 9).order_P
    by_token_TkE, weights_Tk = torch.randn(num_tokens, top_k, size).to(dtype), torch.rand(num_tokens, top_k)
    out_PE = by_token_TkE.flatten(0, 1)[order_P]
    given = (one.to(device) for one in (out_PE, order_P, weights_Tk))
    ours = (triton_sum if form == "triton" else sum_by_token)(*given)
    exact = (by_token_TkE.double() * weights_Tk.double()[..., None]).sum(1)
    tolerance = {torch.float32: 1e-6, torch.float16: 2.0**-10}[dtype]  # of sums up to about 4, rounded once at the end
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double().cpu(), exact, atol=4 * tolerance, rtol=tolerance)


def test_a_tokens_result_does_not_depend_on_its_neighbours() -> None:
    x_TE, gate_up, down = torch.randn(40, 16), torch.randn(6, 16, 16), torch.randn(6, 16, 8)
    weights_Tk, ids_Tk = ops.route_top_k(torch.randn(40, 6), 2, renormalize=True)
    together = ops.fused_experts(x_TE, gate_up, down, weights_Tk, ids_Tk)
    alone = torch.cat([ops.fused_experts(x_TE[i : i + 1], gate_up, down, weights_Tk[i : i + 1], ids_Tk[i : i + 1])
                       for i in range(40)])  # fmt: skip
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)


def packed_case(dtype: torch.dtype, num_experts: int, sizes: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    """Plain weights of experts, gates and ups first, and the same ones packed."""
    if not can_pack_panels(torch.empty(32, 32, dtype=dtype)):
        pytest.skip(f"this processor has no panels of {dtype}")
    hidden, inner = sizes
    generator = torch.Generator().manual_seed(hidden)
    gate_up = (torch.randn(num_experts, 2 * inner, hidden, generator=generator) / hidden**0.5).to(dtype)
    down = (torch.randn(num_experts, hidden, inner, generator=generator) / inner**0.5).to(dtype)
    packed = [ops.pack_experts(weight.clone(), ops.ExpertSizes(hidden, inner)) for weight in (gate_up, down)]
    assert all(map(ops.are_packed, packed))
    return gate_up, down, *packed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_experts", "top_k", "sizes"),
    [(5, 2, (64, 32)), (8, 3, (96, 160)), (3, 3, (32, 32)), (40, 8, (128, 96))],
    ids=str,
)
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 17, 33, 300])
def test_packed_experts_equal_the_naive_loop_and_keep_each_token_s_bits(
    num_tokens: int, num_experts: int, top_k: int, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    gate_up, down, *packed = packed_case(dtype, num_experts, sizes)
    generator = torch.Generator().manual_seed(num_tokens)
    x_TE = torch.randn(num_tokens, sizes[0], generator=generator).to(dtype)
    logits_TX = torch.randn(num_tokens, num_experts, generator=generator)
    logits_TX[num_tokens // 2 :, 0] = 9.0  # one expert gets many
    weights_Tk, ids_Tk = ops.route_top_k(logits_TX, top_k, renormalize=True)
    ours = ops.fused_experts(x_TE, *packed, weights_Tk, ids_Tk)
    assert ours.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    exact = naive_experts(x_TE, gate_up, down, weights_Tk, ids_Tk)
    torch.testing.assert_close(ours.double(), exact, atol=tolerance, rtol=tolerance)
    for token in range(0, num_tokens, 7):
        one = slice(token, token + 1)
        assert torch.equal(ops.fused_experts(x_TE[one], *packed, weights_Tk[one], ids_Tk[one]), ours[one])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_experts_of_many_inputs_keep_each_token_s_bits(dtype: torch.dtype) -> None:
    """Whose rows and panels do not stay near together: in slices."""
    gate_up, down, *packed = packed_case(dtype, 2, (2176, 2176))
    x_TE = torch.randn(300, 2176, generator=torch.Generator().manual_seed(0)).to(dtype)
    routed = torch.ones(300, 1), torch.zeros(300, 1, dtype=torch.long)
    ours, few = ops.fused_experts(x_TE, *packed, *routed), [*range(0, 30), *range(250, 275)]
    alone = ops.fused_experts(x_TE[few], *packed, *(part[few] for part in routed))
    pieces = [ops.fused_experts(x_TE[[i]], *packed, *(part[[i]] for part in routed)) for i in (0, 29, 250, 299)]
    exact = naive_experts(x_TE, gate_up, down, *routed)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(ours.double(), exact, atol=tolerance, rtol=tolerance)
    assert torch.equal(alone, ours[few]) and torch.equal(torch.cat(pieces), ours[[0, 29, 250, 299]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_biases", [False, True])
@pytest.mark.parametrize("activation", [None, ops.ClampedSwiglu(1.702, 0.8), "gelu_tanh"])
@pytest.mark.parametrize("num_tokens", [1, 17, 300])
def test_biases_and_other_gates(
    num_tokens: int, activation: ops.ExpertActivation, has_biases: bool, dtype: torch.dtype
) -> None:
    gate_up, down, *packed = packed_case(dtype, 5, (64, 96))
    generator = torch.Generator().manual_seed(num_tokens)
    x_TE = torch.randn(num_tokens, 64, generator=generator).to(dtype)
    noise = [torch.randn(5, size, generator=generator).to(dtype) for size in (192, 64)]
    biases = (noise[0], noise[1]) if has_biases else None
    weights_Tk, ids_Tk = ops.route_top_k(torch.randn(num_tokens, 5, generator=generator), 2, renormalize=True)
    exact = naive_experts(x_TE, gate_up, down, weights_Tk, ids_Tk, biases, activation)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for weights in ((gate_up, down), packed):
        ours = ops.fused_experts(x_TE, *weights, weights_Tk, ids_Tk, biases, activation)
        torch.testing.assert_close(ours.double(), exact, atol=tolerance, rtol=tolerance)
    one = slice(num_tokens // 2, num_tokens // 2 + 1)
    alone = ops.fused_experts(x_TE[one], *packed, weights_Tk[one], ids_Tk[one], biases, activation)
    assert torch.equal(alone, ours[one])


def test_no_number_stays_none_in_a_clamped_gate() -> None:
    gate_up, down, *packed = packed_case(torch.float32, 3, (32, 32))
    x_TE = torch.full((2, 32), torch.nan)
    routed = ops.route_top_k(torch.randn(2, 3), 2, renormalize=True)
    for weights in ((gate_up, down), packed):
        assert ops.fused_experts(x_TE, *weights, *routed, None, ops.ClampedSwiglu(1.702, 7.0)).isnan().all()


def test_packed_experts_have_the_same_bits_on_any_number_of_threads() -> None:
    _, _, *packed = packed_case(torch.float32, 6, (64, 96))
    x_TE, before = torch.randn(70, 64), torch.get_num_threads()
    weights_Tk, ids_Tk = ops.route_top_k(torch.randn(70, 6), 2, renormalize=False)
    results = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        results.append(ops.fused_experts(x_TE, *packed, weights_Tk, ids_Tk))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize(("hidden", "inner"), [(64, 24), (40, 32)])
def test_experts_of_other_sizes_stay_plain(hidden: int, inner: int) -> None:
    for weight in (torch.zeros(4, 2 * inner, hidden), torch.zeros(4, hidden, inner)):
        assert ops.pack_experts(weight, ops.ExpertSizes(hidden, inner)) is weight


def test_experts_without_gates_stay_plain() -> None:
    sizes = ops.ExpertSizes(64, 32, has_gates=False)
    assert sizes.shapes == [(32, 64), (64, 32)]
    for shape in sizes.shapes:
        weight = torch.zeros(4, *shape)
        assert ops.pack_experts(weight, sizes) is weight


@pytest.mark.parametrize("num_tokens", [1, 3, 40, 300])
def test_bf16_with_tokens_of_float32_counts_as_the_float32_it_is(num_tokens: int) -> None:
    gate_up, down, *_ = packed_case(torch.float32, 6, (64, 96))
    sizes = ops.ExpertSizes(64, 96)
    stored = [weight.bfloat16() for weight in (gate_up, down)]
    wide = [ops.pack_experts(weight.float(), sizes) for weight in stored]
    narrow = [ops.pack_experts(weight, sizes, torch.float32) for weight in stored]
    assert all(weight.dtype == torch.bfloat16 and ops.are_packed(weight) for weight in narrow)
    x_TE, biases = torch.randn(num_tokens, 64), (torch.randn(6, 192), torch.randn(6, 64))
    routed = ops.route_top_k(torch.randn(num_tokens, 6), 2, renormalize=True)
    ours = ops.fused_experts(x_TE, *narrow, *routed, biases)
    assert torch.equal(ours, ops.fused_experts(x_TE, *wide, *routed, biases))
