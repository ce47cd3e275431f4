"""Gated activations in Triton: one pass, nothing written in between. SiLU's op is here, GELU's in `gelu_mul`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As the reference."""
    return gated_mul(gate_up, use_gelu=False)


def gated_mul(gate_up: torch.Tensor, *, use_gelu: bool) -> torch.Tensor:
    """`activation(gate) * up`; gate_up: [..., 2 I], gate in the first half; returns [..., I]."""
    rows = gate_up.reshape(-1, gate_up.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    num_rows, size = rows.shape[0], rows.shape[1] // 2
    out = rows.new_empty(num_rows, size)
    if num_rows:
        _gated_mul_kernel[(num_rows, triton.cdiv(size, _BLOCK))](
            rows, out, rows.stride(0), SIZE=size, BLOCK=_BLOCK, USE_GELU=use_gelu, num_warps=4
        )
    return out.view(*gate_up.shape[:-1], size)


@triton.jit
def _gated_mul_kernel(gate_up_ptr, out_ptr, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, USE_GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    index_I = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real_I = index_I < SIZE
    gate_I = tl.load(gate_up_ptr + row * stride + index_I, mask=is_real_I, other=0.0)
    up_I = tl.load(gate_up_ptr + row * stride + SIZE + index_I, mask=is_real_I, other=0.0)
    x_I = gate_I.to(tl.float32)
    if USE_GELU:  # its tanh approximation: 0.5 + 0.5 tanh(y) is sigmoid(2 y)
        gated_I = x_I * tl.sigmoid(1.5957691216057308 * (x_I + 0.044715 * x_I * x_I * x_I))
    else:
        gated_I = x_I * tl.sigmoid(x_I)
    gated_I = gated_I.to(gate_I.dtype).to(tl.float32)  # rounded as the reference does
    tl.store(out_ptr + row * SIZE + index_I, gated_I * up_I.to(tl.float32), mask=is_real_I)
