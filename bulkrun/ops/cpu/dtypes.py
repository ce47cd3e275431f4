"""Which dtypes the compiled ops are made for, as their names end. Knows no op."""

from __future__ import annotations

import torch

from bulkrun.ops.matmul.fp8 import FP8

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_SUFFIXES = {
    (x, weight): f"{_NAMES[x]}_{_NAMES[weight]}" for x in _NAMES for weight in _NAMES if weight.itemsize >= x.itemsize
}


def name(dtype: torch.dtype) -> str | None:
    """The suffix of a function's name for this dtype, None if there is no such function."""
    return _NAMES.get(dtype)


def suffix(dtype: torch.dtype, weight_dtype: torch.dtype) -> str | None:
    """The suffix for functions compiled per pair of dtypes, None if there is none; weights are never the narrower."""
    return _SUFFIXES.get((dtype, weight_dtype))


def cache_format(cache_dtype: torch.dtype, dtype: torch.dtype) -> int | None:
    """What cache_format.h calls a KV cache of this dtype over activations of `dtype`, None if no op is compiled for it.

    A cache in bfloat16 is half of float32's, and its numbers are read exactly.
    """
    if cache_dtype == dtype:
        return 0
    return {FP8: 1, torch.bfloat16: 2 if dtype == torch.float32 else None}.get(cache_dtype)
