"""Gated activations in Triton: one pass, nothing written in between. SiLU's op is here.

GELU's is in `gelu_mul`, that of gpt-oss in `clamped_swiglu`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bulkrun.ops.experts.clamped_swiglu import ClampedSwiglu

_BLOCK = 1024


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As the reference."""
    return gated_mul(gate_up)


def gated_mul(gate_up: torch.Tensor, *, is_gelu: bool = False, swiglu: ClampedSwiglu | None = None) -> torch.Tensor:
    """`activation(gate) * up`, SiLU unless another is asked for; gate_up: [..., 2 I], gate first; returns [..., I]."""
    rows = gate_up.reshape(-1, gate_up.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    num_rows, size = rows.shape[0], rows.shape[1] // 2
    out = rows.new_empty(num_rows, size)
    if num_rows:
        _gated_mul_kernel[(num_rows, triton.cdiv(size, _BLOCK))](
            rows, out, rows.stride(0),
            SIZE=size, BLOCK=_BLOCK, IS_GELU=is_gelu, ALPHA=swiglu.alpha if swiglu else 0.0,
            LIMIT=swiglu.limit if swiglu else 0.0, num_warps=4,
        )  # fmt: skip
    return out.view(*gate_up.shape[:-1], size)


@triton.jit
def _gated_mul_kernel(
    gate_up_ptr,
    out_ptr,
    stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_GELU: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,  # 0.0: none
):
    row = tl.program_id(0).to(tl.int64)
    index_I = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real_I = index_I < SIZE
    gate_I = tl.load(gate_up_ptr + row * stride + index_I, mask=is_real_I, other=0.0)
    up_I = tl.load(gate_up_ptr + row * stride + SIZE + index_I, mask=is_real_I, other=0.0)
    x_I, up_I = gate_I.to(tl.float32), up_I.to(tl.float32)
    if LIMIT > 0.0:  # of gpt-oss: rounded once, and what is no number stays none
        x_I = tl.minimum(x_I, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up_I = tl.clamp(up_I, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL) + 1.0
        gated_I = x_I * tl.sigmoid(ALPHA * x_I)
    else:
        if IS_GELU:  # its tanh approximation: 0.5 + 0.5 tanh(y) is sigmoid(2 y)
            gated_I = x_I * tl.sigmoid(1.5957691216057308 * (x_I + 0.044715 * x_I * x_I * x_I))
        else:
            gated_I = x_I * tl.sigmoid(x_I)
        gated_I = gated_I.to(gate_I.dtype).to(tl.float32)  # rounded as the reference does
    tl.store(out_ptr + row * SIZE + index_I, gated_I * up_I, mask=is_real_I)
