"""Several residual streams, compiled. Contracts: `ops.residual_streams`."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache

import torch

from bulkrun.ops import residual_streams as references
from bulkrun.ops.cpu.dtypes import name
from bulkrun.ops.cpu.library import c_function

_MOST = 8  # streams, as in residual_streams.cpp


def with_rms_of(x: torch.Tensor, like_TE: torch.Tensor, min_mean_square: float) -> torch.Tensor:
    """As the reference."""
    dtype, (num_tokens, size) = name(x.dtype), like_TE.shape
    if dtype is None or like_TE.dtype != x.dtype:
        return references.with_rms_of(x, like_TE, min_mean_square)
    x, like_TE = x.contiguous(), like_TE.contiguous()
    out = torch.empty_like(x)
    _function(f"with_rms_of_{dtype}", 3, 3, (c_float,))(
        x.data_ptr(), like_TE.data_ptr(), out.data_ptr(), x.numel() // size, num_tokens, size, min_mean_square,
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def predict_streams(streams_NTE: torch.Tensor, modes_TN: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As the reference."""
    dtype = name(streams_NTE.dtype)
    if dtype is None or len(streams_NTE) > _MOST:
        return references.predict_streams(streams_NTE, modes_TN, weight)
    streams_NTE, modes_TN, weight = streams_NTE.contiguous(), modes_TN.float().contiguous(), weight.float().contiguous()
    out_NTE = torch.empty_like(streams_NTE)
    _function(f"predict_streams_{dtype}", 4, 3, ())(
        streams_NTE.data_ptr(), modes_TN.data_ptr(), weight.data_ptr(), out_NTE.data_ptr(), *streams_NTE.shape,
        torch.get_num_threads(),
    )  # fmt: skip
    return out_NTE


def correct_streams(
    predicted_NTE: torch.Tensor, computed_TE: torch.Tensor, modes_TN: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """As the reference."""
    dtype = name(predicted_NTE.dtype)
    if dtype is None or computed_TE.dtype != predicted_NTE.dtype or len(predicted_NTE) > _MOST:
        return references.correct_streams(predicted_NTE, computed_TE, modes_TN, weight)
    predicted_NTE, computed_TE = predicted_NTE.contiguous(), computed_TE.contiguous()
    modes_TN, weight = modes_TN.float().contiguous(), weight.float().contiguous()
    out_NTE = torch.empty_like(predicted_NTE)
    _function(f"correct_streams_{dtype}", 5, 3, ())(
        predicted_NTE.data_ptr(), computed_TE.data_ptr(), modes_TN.data_ptr(), weight.data_ptr(), out_NTE.data_ptr(),
        *predicted_NTE.shape, torch.get_num_threads(),
    )  # fmt: skip
    return out_NTE


@cache
def _function(op: str, num_pointers: int, num_sizes: int, more: tuple[type, ...]) -> Callable[..., None]:
    return c_function(op, *[c_void_p] * num_pointers, *[c_int64] * num_sizes, *more, c_int)
