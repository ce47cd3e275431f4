"""What changes logits before their temperature, in place: masks of allowed tokens, penalties for repetition.

Each touches some rows only, and few of their logits or all: a copy of them all would cost more than the work.
"""

from __future__ import annotations

import torch

_NEG_INF = float("-inf")


def apply_token_masks(logits_SV: torch.Tensor, mask_CW: torch.Tensor, row_C: torch.Tensor) -> None:
    """In rows `row_C` (int64, each once) leave only the tokens their mask allows, -inf elsewhere; float32, in place.

    mask_CW: int32 [C, W], bit k of word w allows token 32 w + k. Tokens beyond the mask are forbidden, bits beyond
    the vocabulary say nothing.
    """
    byte_256 = torch.arange(256, device=logits_SV.device)
    is_set_256x8 = (byte_256[:, None] >> byte_256[:8]) & 1 == 1
    bias_256x8 = torch.zeros(256, 8, device=logits_SV.device).masked_fill_(~is_set_256x8, _NEG_INF)
    bytes_CB = mask_CW.contiguous().view(torch.uint8)  # bit k of byte b is token 8 b + k: words are little-endian
    bias_CV = bias_256x8[bytes_CB.int()].flatten(1)[:, : logits_SV.shape[-1]]
    num_beyond = logits_SV.shape[-1] - bias_CV.shape[-1]
    if num_beyond:
        bias_CV = torch.nn.functional.pad(bias_CV, (0, num_beyond), value=_NEG_INF)
    logits_SV.index_add_(0, row_C, bias_CV)  # twice as fast as a fill on a CPU, which takes a branch per token


def apply_penalties(
    logits_SV: torch.Tensor,
    row_A: torch.Tensor,
    token_ids_AP: torch.Tensor,
    prompt_lens_A: torch.Tensor,
    total_lens_A: torch.Tensor,
    *,
    presence_A: torch.Tensor,
    frequency_A: torch.Tensor,
    repetition_A: torch.Tensor,
) -> None:
    """vLLM's penalties in rows `row_A` (int64, each once): repetition over prompt and output, the others over output.

    logits_SV: float32, changed in place. token_ids_AP: int [A, P], each row's prompt, then output, then anything: only
    the first `total_lens_A` (at least one) count. Penalties: float32 [A]; 1, 0, 0 leave a row as it is.
    """
    position_P = torch.arange(token_ids_AP.shape[1], device=logits_SV.device)
    valid_AP = position_P < total_lens_A[:, None]
    output_AP = valid_AP & (position_P >= prompt_lens_A[:, None])
    # only logits of tokens that occur are touched; what does not count repeats the row's first token
    ids_AP = torch.where(valid_AP, token_ids_AP, token_ids_AP[:, :1]).long()
    counts_AV = torch.zeros(len(row_A), logits_SV.shape[1], device=logits_SV.device)
    counts_AP = counts_AV.scatter_add_(1, ids_AP, output_AP.to(logits_SV.dtype)).gather(1, ids_AP)

    raw_AP, repetition_A1 = logits_SV[row_A[:, None], ids_AP], repetition_A[:, None]
    penalized_AP = torch.where(raw_AP > 0, raw_AP / repetition_A1, raw_AP * repetition_A1)
    penalized_AP -= frequency_A[:, None] * counts_AP + presence_A[:, None] * (counts_AP > 0)
    logits_SV[row_A[:, None], ids_AP] = penalized_AP
