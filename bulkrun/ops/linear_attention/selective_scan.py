"""Mamba's selective state space: each channel forgets each of its numbers by one of its own, a token at a time.

Gu, Dao: Mamba: Linear-Time Sequence Modeling with Selective State Spaces (2023). Token by token in prompts too, so that
a sequence's numbers do not depend on how its tokens are spread over steps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bulkrun.ops.attention.metadata import AttentionMetadata
from bulkrun.ops.linear_attention.chunks import chunks_of, states_before


def selective_scan(
    x_TC: torch.Tensor,
    dt_TC: torch.Tensor,
    b_TN: torch.Tensor,
    c_TN: torch.Tensor,
    gate_TC: torch.Tensor,
    rate_NC: torch.Tensor,
    dt_bias_C: torch.Tensor,
    d_C: torch.Tensor,
    state_RHNP: torch.Tensor,
    meta: AttentionMetadata,
) -> torch.Tensor:
    """Outputs [T, C] in x's dtype; all sums are float32.

    x, dt, b, c and gate: of one dtype, any stride between tokens. rate, dt_bias and d: float32, rates below zero. Each
    of C channels has N numbers of state. For a token, with `step = softplus(dt + dt_bias)`:

        state = exp(step * rate) * state + b (step * x)^T
        output = (state^T c + d * x) * silu(gate)

    state_RHNP: float32, each row's, H heads of P consecutive channels, written in place; where a sequence begins it is
    zeros, whatever is there. Tokens that pad a step give zeros and write nothing.
    """
    chunks = chunks_of(meta)
    x, b, c = x_TC.float(), b_TN.float(), c_TN.float()
    step_TC = F.softplus(dt_TC.float() + dt_bias_C)  # of all tokens: those of a few would have other bits beside others
    factor_TC = F.silu(gate_TC.float())
    out_TC = torch.zeros_like(x)
    state_SNC = states_before(state_RHNP, chunks).transpose(1, 2).flatten(2)
    for step in range(meta.max_query_len):
        (live,) = (chunks.count_S > step).nonzero(as_tuple=True)
        if not len(live):
            break
        at = chunks.first_S[live] + step
        state = state_SNC[live] * (step_TC[at, None] * rate_NC).exp()
        state += b[at].unsqueeze(-1) * (step_TC[at] * x[at]).unsqueeze(1)
        out_TC[at] = ((state * c[at].unsqueeze(-1)).sum(1) + d_C * x[at]) * factor_TC[at]
        state_SNC[live] = state
    num_heads, head_dim = state_RHNP.shape[1], state_RHNP.shape[3]
    state_RHNP[chunks.row_S] = state_SNC.unflatten(2, (num_heads, head_dim)).transpose(1, 2)
    return out_TC.to(x_TC.dtype)
