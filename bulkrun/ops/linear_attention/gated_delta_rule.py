"""The gated delta rule: linear attention whose state forgets, and is corrected instead of added to.

Yang, Kautz, Hatamizadeh: Gated Delta Networks (2024); with a decay for each channel of keys, Kimi Team: Kimi Linear
(2025, arXiv 2510.26692). Computed token by token, in prompts too, and not in chunks that
are multiplied as matrices: so a sequence's numbers do not depend on how its tokens are spread over steps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bulkrun.ops.attention.metadata import AttentionMetadata
from bulkrun.ops.linear_attention.chunks import chunks_of, states_before

NORM_EPS = 1e-6  # under the root of a query's or key's length


def gated_delta_rule(
    qkv_TC: torch.Tensor,
    ba_TG: torch.Tensor,
    a_log_H: torch.Tensor,
    dt_bias: torch.Tensor,
    state_RHDV: torch.Tensor,
    meta: AttentionMetadata,
    *,
    beta_scale: float = 1.0,
) -> torch.Tensor:
    """Outputs [T, H, V] in qkv's dtype; all sums are float32.

    H value heads of V dimensions read with K key heads of D dimensions, H / K each. qkv_TC: contiguous, queries [K, D],
    keys [K, D] and values [H, V] of each token. ba_TG: any stride between tokens: b [H], then a, which with dt_bias is
    of a head [H], or of each channel of a head's keys [H * D]. For a token with query and key scaled to length 1,
    `decay = exp(-exp(a_log) * softplus(a + dt_bias))` and `beta = beta_scale * sigmoid(b)` (2: a state may be turned
    around; Grazzi et al. 2024, negative eigenvalues):

        state = decay * state                                             (each row by its channel's, if it has one)
        state = state + key (beta * (value - state^T key))^T
        output = state^T query / sqrt(D)

    state_RHDV: float32, each row's, written in place; where a sequence begins it is zeros, whatever is there. Tokens
    that pad a step give zeros and write nothing.
    """
    chunks = chunks_of(meta)
    num_heads, size, value_size = state_RHDV.shape[1:]
    key_dim = (qkv_TC.shape[1] - num_heads * value_size) // 2
    q_THD, k_THD = (_unit_heads(part, size, num_heads) for part in qkv_TC[:, : 2 * key_dim].split(key_dim, dim=1))
    v_THV = qkv_TC[:, 2 * key_dim :].unflatten(1, (num_heads, value_size)).float()
    b_TH, a_TA = ba_TG.float().tensor_split((num_heads,), dim=1)
    beta_TH = b_TH.sigmoid() * beta_scale  # of all tokens: those of a few would have other bits beside others
    step_THA = F.softplus(a_TA + dt_bias.float()).unflatten(1, (num_heads, -1))
    decay_THA1 = (-a_log_H.float().exp()[:, None] * step_THA).exp().unsqueeze(-1)
    out_THV = torch.zeros_like(v_THV)
    state_SHDV = states_before(state_RHDV, chunks)
    for step in range(meta.max_query_len):
        (live,) = (chunks.count_S > step).nonzero(as_tuple=True)
        if not len(live):
            break
        at = chunks.first_S[live] + step
        state = state_SHDV[live] * decay_THA1[at]
        key_SHD1, query_SHD1 = k_THD[at].unsqueeze(-1), q_THD[at].unsqueeze(-1)
        error_SHV = v_THV[at] - (state * key_SHD1).sum(2)  # as a product its bits would depend on who is beside
        state += key_SHD1 * (error_SHV * beta_TH[at, :, None]).unsqueeze(2)
        out_THV[at] = (state * query_SHD1).sum(2) * size**-0.5
        state_SHDV[live] = state
    state_RHDV[chunks.row_S] = state_SHDV
    return out_THV.to(qkv_TC.dtype)


def _unit_heads(x_TA: torch.Tensor, size: int, num_heads: int) -> torch.Tensor:
    """Heads of length 1, float32 [T, H, D]; each serves consecutive value heads."""
    x_TKD = x_TA.unflatten(1, (-1, size)).float()
    x_TKD = x_TKD * (x_TKD.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()
    return x_TKD.repeat_interleave(num_heads // x_TKD.shape[1], dim=1)
