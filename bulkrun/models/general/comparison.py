"""How far two ways to compute the same numbers are apart, and how far rounding alone may bring them.

A model that runs here in another way than transformers runs it is believed once both give the same numbers: right ones
differ by rounding, whatever else a model does shows. Knows no model.
"""

from __future__ import annotations

import torch

# Shares of the numbers' spread, of the worst row. In float32 right models were seen at 1e-6, be it padding that moves
# them or a paged cache; one that mixes in what stands beside a token, with random weights that are too small to do
# much, at 0.005. In bfloat16 right models were seen at 0.04; unrelated numbers are at 1.1.
_TOLERANCE, _HALF_TOLERANCE = 1e-3, 0.1


def distance(ours_TE: torch.Tensor, theirs_TE: torch.Tensor) -> float:
    """Mean difference of a row's numbers in units of their spread, of the worst row.

    The worst, because a model that mixes a token with the one before is wrong only where a chunk begins.
    """
    return float(((ours_TE - theirs_TE).abs().mean(-1) / theirs_TE.std(-1)).max())


def tolerance(dtype: torch.dtype) -> float:
    """How far numbers that were computed in this dtype may be apart."""
    return _TOLERANCE if dtype == torch.float32 else _HALF_TOLERANCE
