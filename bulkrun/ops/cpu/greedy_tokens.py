"""The likeliest tokens, compiled: logits are read in their own dtype. Contract: `ops.sampling.greedy_tokens`."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_int, c_int64, c_void_p
from functools import cache

import torch

from bulkrun.ops.cpu.dtypes import name
from bulkrun.ops.cpu.library import c_function
from bulkrun.ops.sampling.greedy_tokens import greedy_tokens as reference


def greedy_tokens(logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference; bit for bit, except for the tokens of rows that are not finite."""
    dtype, (rows, size) = name(logits_SV.dtype), logits_SV.shape
    if dtype is None or not logits_SV.is_contiguous() or size == 0:
        return reference(logits_SV)
    token_S = logits_SV.new_empty(rows, dtype=torch.int64)
    is_valid_S = logits_SV.new_empty(rows, dtype=torch.bool)
    run = _function(dtype)
    run(logits_SV.data_ptr(), token_S.data_ptr(), is_valid_S.data_ptr(), rows, size, torch.get_num_threads())
    return token_S, is_valid_S


@cache
def _function(dtype: str) -> Callable[..., None]:
    return c_function(f"greedy_tokens_{dtype}", *[c_void_p] * 3, c_int64, c_int64, c_int)
