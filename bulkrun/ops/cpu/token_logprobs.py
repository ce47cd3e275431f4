"""Log-probabilities, compiled: logits are read in the dtype they come in. Contract: `ops.sampling.token_logprobs`."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_int, c_int64, c_void_p
from functools import cache

import torch

from bulkrun.ops.cpu.dtypes import name
from bulkrun.ops.cpu.library import c_function
from bulkrun.ops.sampling.token_logprobs import token_logprobs as reference


def token_logprobs(
    logits_SV: torch.Tensor, token_S: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As the reference, up to the rounding of sums; of equals the first token stands first."""
    dtype, (rows, size) = name(logits_SV.dtype), logits_SV.shape
    if dtype is None or not logits_SV.is_contiguous():
        return reference(logits_SV, token_S, k)
    chosen_S = logits_SV.new_empty(rows, dtype=torch.float32)
    values_Sk = logits_SV.new_empty(rows, k, dtype=torch.float32)
    ids_Sk = logits_SV.new_empty(rows, k, dtype=torch.int64)
    tensors = (logits_SV, token_S.contiguous(), chosen_S, values_Sk, ids_Sk)  # a copy must outlive the call
    _function(dtype)(*[one.data_ptr() for one in tensors], rows, size, k, torch.get_num_threads())
    return chosen_S, values_Sk, ids_Sk


@cache
def _function(dtype: str) -> Callable[..., None]:
    return c_function(f"token_logprobs_{dtype}", *[c_void_p] * 5, *[c_int64] * 3, c_int)
