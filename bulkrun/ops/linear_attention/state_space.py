"""Mamba 2's state space: linear attention whose state forgets, each head by one number a token.

Dao, Gu: Transformers are SSMs (2024). Computed token by token, in prompts too, and not in chunks that are multiplied as
matrices: so a sequence's numbers do not depend on how its tokens are spread over steps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bulkrun.ops.attention.metadata import AttentionMetadata
from bulkrun.ops.linear_attention.chunks import chunks_of, states_before


def state_space(
    xbc_TC: torch.Tensor,
    dt_TH: torch.Tensor,
    a_log_H: torch.Tensor,
    dt_bias_H: torch.Tensor,
    d_H: torch.Tensor,
    state_RHNP: torch.Tensor,
    meta: AttentionMetadata,
) -> torch.Tensor:
    """Outputs [T, H, P] in xbc's dtype; all sums are float32.

    H heads of P dimensions write and read a state of N rows, H / G consecutive ones with the same B and C. xbc_TC: any
    stride between tokens, x [H, P], B [G, N] and C [G, N] of each. dt_TH: of xbc's dtype, any stride between tokens.
    a_log, dt_bias and d: float32. For a token, with `step = softplus(dt + dt_bias)`:

        state = exp(-exp(a_log) * step) * state + B (step * x)^T
        output = state^T C + d * x

    state_RHNP: float32, each row's, written in place; where a sequence begins it is zeros, whatever is there. Tokens
    that pad a step give zeros and write nothing.
    """
    chunks = chunks_of(meta)
    num_heads, size, head_dim = state_RHNP.shape[1:]
    x_TA, bc_TA = xbc_TC.float().tensor_split((num_heads * head_dim,), dim=1)
    x_THP = x_TA.unflatten(1, (num_heads, head_dim))
    b_THN, c_THN = (_of_heads(part, size, num_heads) for part in bc_TA.chunk(2, dim=1))
    step_TH = F.softplus(dt_TH.float() + dt_bias_H)  # of all tokens: those of a few would have other bits beside others
    decay_TH = (-a_log_H.exp() * step_TH).exp()
    out_THP = torch.zeros_like(x_THP)
    state_SHNP = states_before(state_RHNP, chunks)
    for step in range(meta.max_query_len):
        (live,) = (chunks.count_S > step).nonzero(as_tuple=True)
        if not len(live):
            break
        at = chunks.first_S[live] + step
        state = state_SHNP[live] * decay_TH[at, :, None, None]
        state += b_THN[at].unsqueeze(-1) * (step_TH[at, :, None] * x_THP[at]).unsqueeze(2)
        # as a product its bits would depend on who is beside
        out_THP[at] = (state * c_THN[at].unsqueeze(-1)).sum(2) + d_H[:, None] * x_THP[at]
        state_SHNP[live] = state
    state_RHNP[chunks.row_S] = state_SHNP
    return out_THP.to(xbc_TC.dtype)


def _of_heads(x_TA: torch.Tensor, size: int, num_heads: int) -> torch.Tensor:
    """[T, G N] -> [T, H, N]; each group serves consecutive heads."""
    x_TGN = x_TA.unflatten(1, (-1, size))
    return x_TGN.repeat_interleave(num_heads // x_TGN.shape[1], dim=1)
