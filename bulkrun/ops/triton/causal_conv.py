"""A short convolution in Triton: a program takes some channels of a sequence through all its tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bulkrun.ops.attention.metadata import AttentionMetadata

_CHANNELS, _TOKENS = 64, 32


def causal_conv(
    x_TC: torch.Tensor,
    weight_WC: torch.Tensor,
    bias_C: torch.Tensor | None,
    state_RWC: torch.Tensor,
    meta: AttentionMetadata,
    *,
    silu: bool,
) -> torch.Tensor:
    """As the reference."""
    assert meta.rows_S is not None, "layers with a state are given where it is"
    assert x_TC.stride(1) == 1 and weight_WC.is_contiguous() and state_RWC.is_contiguous()
    assert bias_C is None or bias_C.is_contiguous()
    (num_taps, num_channels), num_seqs = weight_WC.shape, meta.rows_S.numel()
    make = torch.zeros if meta.is_padded else torch.empty
    out_TC = make(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
    _causal_conv_kernel[(num_seqs, triton.cdiv(num_channels, _CHANNELS))](
        x_TC,
        weight_WC,
        bias_C,
        state_RWC,
        out_TC,
        meta.rows_S,
        meta.cu_seqlens_q,
        meta.context_lens_S,
        x_TC.stride(0),
        NUM_CHANNELS=num_channels,
        NUM_TAPS=num_taps,
        HAS_BIAS=bias_C is not None,
        SILU=silu,
        CHANNELS=_CHANNELS,
        TOKENS=_TOKENS if meta.max_query_len > 1 else 1,
        SLOTS=triton.next_power_of_2(num_taps - 1),
        num_warps=2,
    )
    return out_TC


@triton.jit
def _causal_conv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    out_ptr,
    rows_ptr,
    cu_seqlens_ptr,
    context_lens_ptr,
    stride,
    NUM_CHANNELS: tl.constexpr,
    NUM_TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    CHANNELS: tl.constexpr,
    TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    seq = tl.program_id(0)
    channel_C = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_real_C = channel_C < NUM_CHANNELS
    first = tl.load(cu_seqlens_ptr + seq).to(tl.int64)
    count = tl.load(cu_seqlens_ptr + seq + 1).to(tl.int64) - first
    if count == 0:  # it pads the step
        return
    before = tl.load(context_lens_ptr + seq) - count
    x_ptr += first * stride
    state_ptr += tl.load(rows_ptr + seq) * ((NUM_TAPS - 1) * NUM_CHANNELS)
    out_ptr += first * NUM_CHANNELS
    for start in range(0, count, TOKENS):
        token_T = start + tl.arange(0, TOKENS)
        is_real_TC = (token_T < count)[:, None] & is_real_C[None, :]
        total_TC = tl.zeros([TOKENS, CHANNELS], tl.float32)
        for tap in tl.static_range(NUM_TAPS):
            input_TC = _inputs(
                x_ptr, state_ptr, token_T + (tap - NUM_TAPS + 1), channel_C, is_real_TC, before, stride,
                NUM_CHANNELS, NUM_TAPS,
            )  # fmt: skip
            weight_C = tl.load(weight_ptr + tap * NUM_CHANNELS + channel_C, mask=is_real_C, other=0.0)
            total_TC += input_TC.to(tl.float32) * weight_C.to(tl.float32)[None, :]
        if HAS_BIAS:
            total_TC += tl.load(bias_ptr + channel_C, mask=is_real_C, other=0.0).to(tl.float32)[None, :]
        if SILU:
            total_TC *= tl.sigmoid(total_TC)
        tl.store(out_ptr + token_T[:, None] * NUM_CHANNELS + channel_C[None, :], total_TC, mask=is_real_TC)

    slot_S = tl.arange(0, SLOTS)
    is_real_SC = (slot_S < NUM_TAPS - 1)[:, None] & is_real_C[None, :]
    last_SC = _inputs(
        x_ptr, state_ptr, count - (NUM_TAPS - 1) + slot_S, channel_C, is_real_SC, before, stride,
        NUM_CHANNELS, NUM_TAPS,
    )  # fmt: skip
    tl.debug_barrier()  # nobody needs the old ones any more
    tl.store(state_ptr + slot_S[:, None] * NUM_CHANNELS + channel_C[None, :], last_SC, mask=is_real_SC)


@triton.jit
def _inputs(
    x_ptr,
    state_ptr,
    source_T,
    channel_C,
    is_real_TC,
    before,
    stride,
    NUM_CHANNELS: tl.constexpr,
    NUM_TAPS: tl.constexpr,
):
    """The inputs at these tokens, of which those before the step are in the state; zeros before the sequence."""
    is_here_T = source_T >= 0
    place_TC = source_T[:, None] * stride + channel_C[None, :]
    here_TC = tl.load(x_ptr + place_TC, mask=is_here_T[:, None] & is_real_TC, other=0.0)
    is_held_T = (source_T < 0) & (source_T + before >= 0)
    place_TC = (source_T + (NUM_TAPS - 1))[:, None] * NUM_CHANNELS + channel_C[None, :]
    held_TC = tl.load(state_ptr + place_TC, mask=is_held_T[:, None] & is_real_TC, other=0.0)
    return tl.where(is_here_T[:, None], here_TC, held_TC)
