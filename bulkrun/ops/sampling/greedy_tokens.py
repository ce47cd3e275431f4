"""The likeliest token of each row: all that a step of greedy sequences asks of its logits."""

from __future__ import annotations

import torch


def greedy_tokens(logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each row's largest logit is, the first of equals: int64 [S]; and whether that is finite: bool [S].

    logits_SV: any float dtype, as the head computes them. A row with a NaN, with +inf or with nothing but -inf is not
    finite, and its token means nothing.
    """
    highest_S, token_S = logits_SV.max(dim=-1)
    return token_S, highest_S.isfinite()
