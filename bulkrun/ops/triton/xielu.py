"""The activation of Apertus in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bulkrun.ops.triton.softplus import softplus
from bulkrun.ops.xielu import BETA, NEAREST

_BLOCK = 1024


def xielu(x: torch.Tensor, alphas: torch.Tensor) -> torch.Tensor:
    """As the reference, in one pass."""
    assert x.is_contiguous() and alphas.is_contiguous()
    out = torch.empty_like(x)
    if x.numel():
        _xielu_kernel[(triton.cdiv(x.numel(), _BLOCK),)](x, alphas, out, x.numel(), BETA, NEAREST, _BLOCK)
    return out


@triton.jit
def _xielu_kernel(x_ptr, alphas_ptr, out_ptr, size, BETA: tl.constexpr, NEAREST: tl.constexpr, BLOCK: tl.constexpr):
    index_I = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_real_I = index_I < size
    raw_I = tl.load(x_ptr + index_I, mask=is_real_I, other=0.0)
    x_I = raw_I.to(tl.float32)
    p = softplus(tl.load(alphas_ptr))
    n = softplus(tl.load(alphas_ptr + 1)) + BETA
    below_I = (tl.exp(tl.minimum(x_I, NEAREST)) - 1.0 - x_I) * n
    tl.store(out_ptr + index_I, tl.where(x_I > 0, x_I * x_I * p, below_I) + x_I * BETA, mask=is_real_I)
