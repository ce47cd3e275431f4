"""A norm before or behind a gate in Triton: a program has some heads of one token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_NUMBERS = 1024  # of a program


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    norm_before_gate: bool = True,
    silu: bool = True,
) -> torch.Tensor:
    """As the reference."""
    num_tokens, num_heads, size = x.shape
    assert x.is_contiguous() and gate.stride()[1:] == (size, 1) and weight.is_contiguous()
    out, block = torch.empty_like(x), triton.next_power_of_2(size)
    heads = max(1, min(_NUMBERS // block, triton.next_power_of_2(num_heads)))
    if num_tokens:
        _gated_rms_norm_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
            x, gate, weight, out, eps, gate.stride(0),
            NUM_HEADS=num_heads, SIZE=size, WEIGHT_STRIDE=size if weight.ndim > 1 else 0,
            NORM_BEFORE_GATE=norm_before_gate, SILU=silu, HEADS=heads, BLOCK=block,
            num_warps=min(max(block // 512, 4), 16),
        )  # fmt: skip
    return out


@triton.jit
def _gated_rms_norm_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    eps,
    gate_stride,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,  # between heads
    NORM_BEFORE_GATE: tl.constexpr,
    SILU: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head_H = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    index_E = tl.arange(0, BLOCK)
    is_real_E = index_E < SIZE
    is_real_HE = (head_H < NUM_HEADS)[:, None] & is_real_E[None, :]
    place_HE = head_H[:, None] * SIZE + index_E[None, :]
    x_HE = tl.load(x_ptr + token * (NUM_HEADS * SIZE) + place_HE, mask=is_real_HE, other=0.0)
    gate_HE = tl.load(gate_ptr + token * gate_stride + place_HE, mask=is_real_HE, other=0.0).to(tl.float32)
    factor_HE = tl.sigmoid(gate_HE)
    if SILU:
        factor_HE *= gate_HE
    if WEIGHT_STRIDE == 0:
        weight_HE = tl.load(weight_ptr + index_E, mask=is_real_E, other=0.0)[None, :]
    else:
        weight_HE = tl.load(weight_ptr + place_HE, mask=is_real_HE, other=0.0)
    number_HE = x_HE.to(tl.float32)
    if not NORM_BEFORE_GATE:
        number_HE *= factor_HE
    scale_H = tl.rsqrt(tl.sum(number_HE * number_HE, 1) / SIZE + eps)
    normed_HE = (number_HE * scale_H[:, None]).to(x_HE.dtype).to(tl.float32)
    out_HE = normed_HE * weight_HE.to(tl.float32)
    if NORM_BEFORE_GATE:
        out_HE = out_HE.to(x_HE.dtype).to(tl.float32) * factor_HE  # rounded as the reference does
    tl.store(out_ptr + token * (NUM_HEADS * SIZE) + place_HE, out_HE, mask=is_real_HE)
