"""Softplus in Triton, exact where it is small. Knows no op."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(a):
    """log(1 + exp(a)) without what 1 + exp(a) is rounded by: heads that forget little do so for thousands of tokens.

    After Kahan, HP-15C Advanced Functions Handbook (1982): both factors are off by the same rounding.
    """
    small = tl.exp(tl.minimum(a, 20.0))
    total = 1.0 + small
    is_rounded_away = total == 1.0
    beside_1 = tl.where(is_rounded_away, 1.0, total - 1.0)
    return tl.where(a > 20.0, a, tl.where(is_rounded_away, small, tl.log(total) * (small / beside_1)))
