"""A token of each row, drawn from what temperature and filters make of its logits: the last step of sampling."""

from __future__ import annotations

import torch

from bulkrun.ops.sampling.sampling import apply_min_p, apply_temperature, apply_top_k_top_p, gumbel_noise, sample


def draw_tokens(
    logits_SV: torch.Tensor,
    temperature_S: torch.Tensor,
    seed_S: torch.Tensor,
    position_S: torch.Tensor,
    *,
    min_p_S: torch.Tensor | None = None,
    top_k_S: torch.Tensor | None = None,
    top_p_S: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens drawn from softmax(logits / temperature), int64 [S], and whether the highest logit is finite, bool [S].

    logits_SV: any float dtype, as the head computes them or shaped by masks and penalties; left as they are. Rows of
    temperature 0 take their likeliest token. seed_S, position_S: int64, the noise (`gumbel_noise`). Filters as in
    `apply_min_p` and `apply_top_k_top_p`, in this order; None: nobody wants it. A row with a NaN, with +inf or with
    nothing but -inf is not finite, and its token means nothing.
    """
    is_valid_S = logits_SV.max(dim=-1).values.isfinite()
    filtered_SV = filtered(logits_SV, temperature_S, min_p_S, top_k_S, top_p_S)
    noise_SV = gumbel_noise(seed_S, position_S, filtered_SV.shape[-1])
    return sample(filtered_SV, temperature_S, noise_SV), is_valid_S


def filtered(
    logits_SV: torch.Tensor,
    temperature_S: torch.Tensor,
    min_p_S: torch.Tensor | None,
    top_k_S: torch.Tensor | None,
    top_p_S: torch.Tensor | None,
) -> torch.Tensor:
    """Scaled logits, float32 [S, V], -inf where a filter drops the token."""
    scaled_SV = apply_temperature(logits_SV.float(), temperature_S)
    if min_p_S is not None:
        scaled_SV = apply_min_p(scaled_SV, min_p_S)
    if top_k_S is None and top_p_S is None:
        return scaled_SV
    top_k_S = torch.zeros_like(temperature_S, dtype=torch.int64) if top_k_S is None else top_k_S
    top_p_S = torch.ones_like(temperature_S) if top_p_S is None else top_p_S
    return apply_top_k_top_p(scaled_SV, top_k_S, top_p_S, max_top_k=_max_top_k(top_k_S, temperature_S))


def _max_top_k(top_k_S: torch.Tensor, temperature_S: torch.Tensor) -> int | None:
    """The largest top_k where all rows that draw have one; elsewhere than on a CPU None, for asking would wait."""
    drawing = top_k_S[temperature_S != 0] if top_k_S.is_cpu else top_k_S[:0]
    return int(drawing.max()) if drawing.numel() and bool((drawing > 0).all()) else None
