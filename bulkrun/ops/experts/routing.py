"""Which experts of a mixture a token goes to, and how much each of them counts."""

from __future__ import annotations

import torch

_NO_ZERO = 1e-6  # LFM2's own, which is lost in a sum that is not next to nothing


def route_top_k(
    logits_TX: torch.Tensor, top_k: int, *, renormalize: bool, bias_X: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `top_k` likeliest of X experts for each token: weights float32 [T, k], ids int64 [T, k].

    The softmax is over all experts, in float32; `renormalize` makes the kept weights sum to 1. bias_X: as of
    `route_by_sigmoid`.
    """
    scores_TX = logits_TX.float().softmax(-1)
    weights_Tk, ids_Tk = _chosen(scores_TX, bias_X, top_k)
    if renormalize:
        weights_Tk = weights_Tk / weights_Tk.sum(-1, keepdim=True)
    return weights_Tk, ids_Tk


def route_by_sigmoid(
    logits_TX: torch.Tensor, bias_X: torch.Tensor | None, top_k: int, *, renormalize: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `top_k` experts of the highest scores for each token: weights float32 [T, k], ids int64 [T, k].

    Each expert's score is its own sigmoid, in float32. bias_X: float32, added to scores where experts are chosen and
    not to their weights, so that in training none was left out (Wang et al. 2024: auxiliary-loss-free load balancing).
    Weights are the scores, with `renormalize` over their sum, times `scale`.
    """
    weights_Tk, ids_Tk = _chosen(logits_TX.float().sigmoid(), bias_X, top_k)
    if renormalize:
        weights_Tk = weights_Tk / (weights_Tk.sum(-1, keepdim=True) + _NO_ZERO)
    return weights_Tk * scale, ids_Tk


def _chosen(scores_TX: torch.Tensor, bias_X: torch.Tensor | None, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of the highest scores with their bias: their scores [T, k], and which they are [T, k]."""
    if bias_X is None:
        return scores_TX.topk(top_k, dim=-1)
    ids_Tk = (scores_TX + bias_X).topk(top_k, dim=-1).indices
    return scores_TX.gather(-1, ids_Tk), ids_Tk
