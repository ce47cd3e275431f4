"""Conversion to the dtype of a cache or an output inside a kernel: what `ops.matmul.fp8.to_fp8` does to a tensor."""

from __future__ import annotations

import triton
import triton.language as tl

from bulkrun.ops.matmul.fp8 import FP8_MAX

_FP8_MAX = tl.constexpr(FP8_MAX)


@triton.jit
def to_dtype(x, DTYPE: tl.constexpr):
    """x rounded to DTYPE; fp8 saturates, and NaN stays NaN (a minimum would drop it)."""
    if DTYPE.is_fp8():
        x = x.to(tl.float32)
        x = tl.where(x > _FP8_MAX, _FP8_MAX, x)
        x = tl.where(x < -_FP8_MAX, -_FP8_MAX, x)
    return x.to(DTYPE)
