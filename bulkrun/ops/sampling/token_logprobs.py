"""What a step tells of its choice: log-probabilities of the chosen token and of the likeliest ones."""

from __future__ import annotations

import torch


def token_logprobs(
    logits_SV: torch.Tensor, token_S: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Natural log-probabilities under the raw logits: each row's token's, float32 [S], and the k likeliest ones'.

    Those are float32 [S, k], descending, of equals the first token first, with their ids, int64 [S, k]. logits_SV: any
    float dtype, as the head computes them. Of a row that `greedy_tokens` calls not finite the numbers mean nothing. A
    row's numbers do not depend on the rows beside it.
    """
    ids_Sk = logits_SV.sort(dim=-1, descending=True, stable=True).indices[:, :k]  # topk's choice of equals depends on k
    # not by a logsumexp, which shares a sum out by the number of rows and threads
    logprobs_SV = logits_SV.log_softmax(-1, dtype=torch.float32)
    return logprobs_SV.gather(1, token_S[:, None]).squeeze(1), logprobs_SV.gather(1, ids_Sk), ids_Sk
