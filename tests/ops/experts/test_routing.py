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


def test_experts_whose_scores_are_all_rounded_to_one_are_told_apart() -> None:
    logits_TX = torch.tensor([[30.0, 40.0, 31.0, -1.0], [90.0, 20.0, 80.0, 85.0]])
    weights_Tk, ids_Tk = ops.route_by_sigmoid(logits_TX, None, 2, renormalize=False, scale=1.0)
    assert ids_Tk.tolist() == [[1, 2], [0, 3]] and weights_Tk.tolist() == [[1.0, 1.0]] * 2


def test_scores_that_are_all_next_to_nothing_give_numbers() -> None:
    weights_Tk, _ = ops.route_by_sigmoid(torch.full((2, 4), -200.0), None, 2, renormalize=True, scale=1.0)
    assert weights_Tk.tolist() == [[0.0, 0.0]] * 2


@pytest.mark.parametrize("num_counted", [1, 2])
@pytest.mark.parametrize(("num_groups", "num_kept"), [(2, 1), (4, 2), (3, 3)])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_experts_are_of_the_best_groups_alone(scores: str, num_groups: int, num_kept: int, num_counted: int) -> None:
    """Beside a loop over tokens; of the others none is chosen, however low the scores of the best are."""
    generator, top_k, size = torch.Generator().manual_seed(num_groups), 3, 12 // num_groups
    logits_TX, bias_X = torch.randn(29, 12, generator=generator) * 3, torch.randn(12, generator=generator) * 2
    groups = (num_groups, num_kept, num_counted)
    if scores == "softmax":
        weights_Tk, ids_Tk = ops.route_top_k(logits_TX, top_k, renormalize=False, scale=1.5, groups=groups)
        scores_TX = logits_TX.double().softmax(-1)
        bias_X = torch.zeros(12)
    else:
        weights_Tk, ids_Tk = ops.route_by_sigmoid(logits_TX, bias_X, top_k, renormalize=False, scale=1.5, groups=groups)
        scores_TX = logits_TX.double().sigmoid()
    for token in range(29):
        ranks = (scores_TX[token] + bias_X).tolist()
        by_group = [sorted(ranks[first : first + size])[-num_counted:] for first in range(0, 12, size)]
        best = sorted(range(num_groups), key=lambda group: sum(by_group[group]))[-num_kept:]
        allowed = [expert for expert in range(12) if expert // size in best]
        assert {*ids_Tk[token].tolist()} == {*sorted(allowed, key=lambda one: ranks[one])[-top_k:]}
        expected = 1.5 * scores_TX[token, ids_Tk[token]]
        torch.testing.assert_close(weights_Tk[token].double(), expected, atol=1e-6, rtol=1e-5)
