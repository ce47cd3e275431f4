"""Several residual streams of a token: made, predicted, corrected (AltUp: Baykal et al., arXiv 2301.13310)."""

from __future__ import annotations

import torch


def with_rms_of(x: torch.Tensor, like_TE: torch.Tensor, min_mean_square: float) -> torch.Tensor:
    """Rows of x [..., T, E] with the root mean square of `like_TE`'s [T, E], in x's dtype.

    A row's own mean square counts as `min_mean_square` at least. Means are taken in float32.
    """
    x_float = x.float()
    wanted = like_TE.float().square().mean(-1, keepdim=True)
    found = x_float.square().mean(-1, keepdim=True).clamp_(min=min_mean_square)
    return (x_float * (wanted / found).sqrt_()).to(x.dtype)


def predict_streams(streams_NTE: torch.Tensor, modes_TN: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Each stream plus a mixture of all, [N, T, E]; added up in float32, from the first one on.

    modes_TN: what a token's mixtures depend on. weight: [N * N, N], which makes of it how much of each stream (the
    second of the two N) is added to each.
    """
    coefs_TNN = _of_modes(modes_TN, weight).unflatten(-1, (len(streams_NTE), -1))
    predicted_NTE = streams_NTE.float()
    for coefs_TN, stream_TE in zip(coefs_TNN.unbind(-1), streams_NTE.float(), strict=True):
        predicted_NTE = predicted_NTE + coefs_TN.t().unsqueeze(-1) * stream_TE
    return predicted_NTE.to(streams_NTE.dtype)


def correct_streams(
    predicted_NTE: torch.Tensor, computed_TE: torch.Tensor, modes_TN: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """Each predicted stream plus what was computed of the first one beyond its prediction, times a gain of its own.

    modes_TN: what a token's gains depend on. weight: [N, N], which makes of it by how much they are above 1. All is
    added up in float32. Returns [N, T, E].
    """
    predicted = predicted_NTE.float()
    news_TE = computed_TE.float() - predicted[0]
    gains_NT1 = _of_modes(modes_TN, weight).add_(1.0).t().unsqueeze(-1)
    return (predicted + gains_NT1 * news_TE).to(predicted_NTE.dtype)


def _of_modes(modes_TN: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Their product [T, O] in float32, added up in one order whatever the number of tokens."""
    products = modes_TN.float().unsqueeze(1) * weight.float()
    return torch.stack(products.unbind(-1)).sum(0)
