"""A short convolution over each sequence's last tokens, channel by channel, with or without SiLU."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bulkrun.ops.attention.metadata import AttentionMetadata
from bulkrun.ops.linear_attention.chunks import chunks_of, states_before


def causal_conv(
    x_TC: torch.Tensor,
    weight_WC: torch.Tensor,
    bias_C: torch.Tensor | None,
    state_RWC: torch.Tensor,
    meta: AttentionMetadata,
    *,
    silu: bool,
) -> torch.Tensor:
    """`bias + sum over w of weight[w] * x[token - (W - 1) + w]` [T, C], in x's dtype, summed in float32.

    x_TC: C channels of all tokens in `meta`'s order, any stride between tokens. bias_C: of the weight's dtype; None:
    zeros. silu: of the sum, before it is rounded. state_RWC: of each row the W - 1 inputs before this step's, written
    in place; where a sequence begins they are zeros, whatever is there. Tokens that pad a step give zeros and write
    nothing.
    """
    chunks, width = chunks_of(meta), weight_WC.shape[0] - 1
    before_SWC = states_before(state_RWC, chunks)
    num_seqs, num_tokens = len(chunks.count_S), int(chunks.count_S.sum())
    order_S = torch.arange(num_seqs, device=x_TC.device)
    tap_W = torch.arange(width, device=x_TC.device)
    # all sequences one after another, each behind the inputs before it
    row_T = torch.arange(num_tokens, device=x_TC.device) + (order_S.repeat_interleave(chunks.count_S) + 1) * width
    first_S = chunks.first_S + order_S * width
    known = x_TC.new_empty(num_tokens + num_seqs * width, x_TC.shape[1], dtype=torch.float32)
    known[first_S[:, None] + tap_W] = before_SWC
    known[row_T] = x_TC[:num_tokens].float()
    total_TC = torch.zeros(x_TC.shape, dtype=torch.float32, device=x_TC.device)
    taps = enumerate(weight_WC.float())
    total_TC[:num_tokens] = sum(known[row_T - width + tap] * weight_C for tap, weight_C in taps)
    if bias_C is not None:
        total_TC[:num_tokens] += bias_C.float()
    state_RWC[chunks.row_S] = known[(first_S + chunks.count_S)[:, None] + tap_W].to(state_RWC.dtype)
    # of all tokens: torch computes the last numbers that fill no vector in another way (`models.decoder.invariant`)
    return (F.silu(total_TC) if silu else total_TC).to(x_TC.dtype)
