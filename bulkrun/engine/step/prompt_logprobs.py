"""Log-probabilities of the tokens of prompts, from the hidden states that a step has anyway.

The logits of a whole prompt are the largest tensor anybody could ask for, so they never exist at once: the head is
applied to a bounded number of rows at a time, and only the few numbers that were asked for are kept.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from bulkrun import ops
from bulkrun.engine.scheduling.scheduled_batch import ScheduledBatch
from bulkrun.engine.scheduling.sequence import Sequence
from bulkrun.models.language_model import LanguageModel
from bulkrun.request import TokenLogprob

MAX_LOGITS = 2**24  # float32 numbers held at once: 64 MiB


class _Wanted(NamedTuple):
    """A sequence's tokens `first` to `end` get their log-probability in this step."""

    seq: Sequence
    row: int  # of the hidden state that predicts the token `first`; the next ones follow
    first: int
    end: int


def asks_for_prompt_logprobs(batch: ScheduledBatch) -> bool:
    """Whether some sequence does: then hidden states are wanted that no token is sampled from."""
    return any(seq.prompt_logprobs is not None for seq in batch.seqs[batch.num_decode_seqs :])


def add_prompt_logprobs(model: LanguageModel, hidden_TE: torch.Tensor, batch: ScheduledBatch) -> None:
    """Give the sequences of the batch that ask for it the log-probabilities of the tokens this step has predicted.

    hidden_TE: the step's hidden states after the last norm, in batch order.
    """
    wanted = _wanted(batch)
    if not wanted:
        return
    rows = [row for one in wanted for row in range(one.row, one.row + one.end - one.first)]
    tokens = [token for one in wanted for token in one.seq.token_ids[one.first : one.end]]
    num_top = [one.seq.request.sampling.prompt_logprobs or 0 for one in wanted for _ in range(one.first, one.end)]
    entries = iter(_logprobs(model, hidden_TE, rows, tokens, num_top))
    for one in wanted:
        assert one.seq.prompt_logprobs is not None, "only those who ask are wanted"
        one.seq.prompt_logprobs += [next(entries) for _ in range(one.first, one.end)]


def _wanted(batch: ScheduledBatch) -> list[_Wanted]:
    """The tokens still missing that this step can give; after a preemption some are known already."""
    wanted = []
    offset = batch.num_decode_seqs  # a token of a decoding sequence predicts no token of a prompt
    for index in range(batch.num_decode_seqs, len(batch.seqs)):
        seq, start, count = batch.seqs[index], batch.starts[index], batch.num_scheduled_tokens[index]
        if seq.prompt_logprobs is not None:
            first = max(start + 1, len(seq.prompt_logprobs))
            end = min(start + count + 1, seq.num_prompt_tokens)
            if first < end:
                wanted.append(_Wanted(seq, offset + first - 1 - start, first, end))
        offset += count
    return wanted


def _logprobs(
    model: LanguageModel, hidden_TE: torch.Tensor, rows: list[int], tokens: list[int], num_top: list[int]
) -> list[TokenLogprob]:
    """One entry per row: of the token that really came, and of the `num_top` likeliest ones."""
    vocab_size, device = model.config.vocab_size, hidden_TE.device
    row_P, token_P = torch.tensor([rows, tokens], dtype=torch.int64).to(device).unbind(0)
    share = max(1, MAX_LOGITS // vocab_size)
    entries: list[TokenLogprob] = []
    for row_S, token_S in zip(row_P.split(share), token_P.split(share), strict=True):
        logits_SV = model.compute_logits(hidden_TE[row_S])
        found = ops.token_logprobs(logits_SV, token_S, min(max(num_top), vocab_size))
        for logprob, top_values, top_ids in zip(*(tensor.tolist() for tensor in found), strict=True):
            k = num_top[len(entries)]
            top = tuple(zip(top_ids[:k], top_values[:k], strict=True))
            entries.append(TokenLogprob(tokens[len(entries)], logprob, top))
    return entries
