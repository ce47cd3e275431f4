"""Which experts of a mixture a token goes to, and how much each of them counts."""

from __future__ import annotations

import torch

Groups = tuple[int, int, int]  # how many there are, how many of them count, and by how many of their best experts
_NO_ZERO = 1e-6  # LFM2's own, which is lost in a sum that is not next to nothing


def route_top_k(
    logits_TX: torch.Tensor,
    top_k: int,
    *,
    renormalize: bool,
    bias_X: torch.Tensor | None = None,
    scale: float = 1.0,
    groups: Groups | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `top_k` likeliest of X experts for each token: weights float32 [T, k], ids int64 [T, k].

    The softmax is over all experts, in float32; `renormalize` makes the kept weights sum to 1, before all are
    multiplied by `scale`. bias_X, groups: as of `route_by_sigmoid`.
    """
    scores_TX = logits_TX.float().softmax(-1)
    weights_Tk, ids_Tk = _chosen(scores_TX, bias_X, top_k, groups)
    if renormalize:
        weights_Tk = weights_Tk / weights_Tk.sum(-1, keepdim=True)
    return weights_Tk if scale == 1.0 else weights_Tk * scale, ids_Tk


def route_by_sigmoid(
    logits_TX: torch.Tensor,
    bias_X: torch.Tensor | None,
    top_k: int,
    *,
    renormalize: bool,
    scale: float,
    groups: Groups | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `top_k` experts of the highest scores for each token: weights float32 [T, k], ids int64 [T, k].

    Each expert's score is its own sigmoid, in float32. bias_X: float32, added to scores where experts are chosen and
    not to their weights, so that in training none was left out (Wang et al. 2024: auxiliary-loss-free load balancing).
    Weights are the scores, with `renormalize` over their sum, times `scale`. groups: experts lie in so many groups of
    one size, and a token goes to those of so many groups alone, of which so many of the best experts have the highest
    scores together (DeepSeek-AI 2024: device-limited routing).
    """
    if bias_X is None and groups is None:  # by logits, which differ where scores are all rounded to 1
        best_Tk, ids_Tk = logits_TX.float().topk(top_k, dim=-1)
        weights_Tk = best_Tk.sigmoid()
    else:
        weights_Tk, ids_Tk = _chosen(logits_TX.float().sigmoid(), bias_X, top_k, groups)
    if renormalize:
        weights_Tk = weights_Tk / (weights_Tk.sum(-1, keepdim=True) + _NO_ZERO)
    return weights_Tk * scale, ids_Tk


def _chosen(
    scores_TX: torch.Tensor, bias_X: torch.Tensor | None, top_k: int, groups: Groups | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of the highest scores with their bias: their scores [T, k], and which they are [T, k]."""
    if bias_X is None and groups is None:
        return scores_TX.topk(top_k, dim=-1)
    biased_TX = scores_TX if bias_X is None else scores_TX + bias_X
    ids_Tk = (biased_TX if groups is None else _of_best_groups(biased_TX, *groups)).topk(top_k, dim=-1).indices
    return scores_TX.gather(-1, ids_Tk), ids_Tk


def _of_best_groups(scores_TX: torch.Tensor, num_groups: int, num_kept: int, num_counted: int) -> torch.Tensor:
    """The scores of the best groups' experts [T, X]; -inf for those of others."""
    by_group_TGX = scores_TX.unflatten(-1, (num_groups, -1))
    best_TG = by_group_TGX.topk(num_counted, dim=-1).values.sum(-1).topk(num_kept, dim=-1).indices
    is_kept_TG1 = torch.zeros_like(by_group_TGX[..., :1], dtype=torch.bool).scatter_(1, best_TG[..., None], True)
    return by_group_TGX.masked_fill(~is_kept_TG1, -torch.inf).flatten(1)
