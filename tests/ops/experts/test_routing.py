"""Which experts a token goes to by sigmoids, beside a loop over tokens."""

from __future__ import annotations

import pytest
import torch

from bulkrun import ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(0, 4, 2), (1, 4, 1), (23, 7, 3), (5, 3, 3)])
def test_a_bias_chooses_and_sigmoids_weigh(
    num_tokens: int, num_experts: int, top_k: int, has_bias: bool, renormalize: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    logits_TX = torch.randn(num_tokens, num_experts, generator=generator).to(dtype)
    bias_X = torch.randn(num_experts, generator=generator) if has_bias else None
    weights_Tk, ids_Tk = ops.route_by_sigmoid(logits_TX, bias_X, top_k, renormalize=renormalize, scale=2.5)
    assert weights_Tk.dtype == torch.float32 and ids_Tk.shape == weights_Tk.shape == (num_tokens, top_k)
    for logits, weights, ids in zip(logits_TX.double().tolist(), weights_Tk.tolist(), ids_Tk.tolist(), strict=True):
        scores = torch.tensor(logits).sigmoid().tolist()
        ranks = scores if bias_X is None else [score + by for score, by in zip(scores, bias_X.tolist(), strict=True)]
        assert {*ids} == {*sorted(range(num_experts), key=lambda one: ranks[one])[-top_k:]}
        total = sum(scores[one] for one in ids) if renormalize else 1.0
        assert weights == pytest.approx([2.5 * scores[one] / total for one in ids], rel=1e-5)


def test_scores_that_are_all_next_to_nothing_give_numbers() -> None:
    weights_Tk, _ = ops.route_by_sigmoid(torch.full((2, 4), -200.0), None, 2, renormalize=True, scale=1.0)
    assert weights_Tk.tolist() == [[0.0, 0.0]] * 2
