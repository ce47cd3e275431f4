"""Drawing tokens, compiled: logits are read in the dtype they come in. Contract: `ops.sampling.draw_tokens`."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_int, c_int64, c_void_p
from functools import cache

import torch

from bulkrun.ops.cpu.dtypes import name
from bulkrun.ops.cpu.library import c_function
from bulkrun.ops.sampling.draw_tokens import draw_tokens as reference


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
    """As the reference, up to the rounding of logarithms and sums; nothing is sorted."""
    dtype, (rows, size) = name(logits_SV.dtype), logits_SV.shape
    filters = (min_p_S, top_k_S, top_p_S)
    if dtype is None or not logits_SV.is_contiguous() or size == 0:
        return reference(
            logits_SV, temperature_S, seed_S, position_S,
            min_p_S=min_p_S, top_k_S=top_k_S, top_p_S=top_p_S,
        )  # fmt: skip
    token_S = logits_SV.new_empty(rows, dtype=torch.int64)
    is_valid_S = logits_SV.new_empty(rows, dtype=torch.bool)
    numbers = [None if one is None else one.contiguous() for one in (temperature_S, *filters, seed_S, position_S)]
    addresses = [None if one is None else one.data_ptr() for one in (logits_SV, *numbers, token_S, is_valid_S)]
    _function(dtype)(*addresses, rows, size, torch.get_num_threads())
    return token_S, is_valid_S


@cache
def _function(dtype: str) -> Callable[..., None]:
    return c_function(f"draw_tokens_{dtype}", *[c_void_p] * 9, c_int64, c_int64, c_int)
