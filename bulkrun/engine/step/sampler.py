"""Chooses the next tokens of a step on the device, and computes no more than somebody asked for.

Whether anyone asks is decided on the host, from the sampling parameters of the sequences at hand: a batch that is
all greedy is one maximum. Knows no stop conditions. All arithmetic is in ops:
`shape_logits`, then `greedy_tokens` or `draw_tokens`, and `token_logprobs`.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, fields, replace
from math import inf
from typing import NamedTuple

import torch

from bulkrun import ops
from bulkrun.engine.scheduling.sequence import Sequence
from bulkrun.engine.step.model_input import ModelInput
from bulkrun.engine.step.sequence_rows import SequenceRows
from bulkrun.engine.step.staging import HostStaging
from bulkrun.engine.step.token_masks import TokenMasks
from bulkrun.request import SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token per sampling sequence S': on the device, then on its way to the host, then there."""

    token_ids: torch.Tensor  # int64 [S']
    is_valid: torch.Tensor  # bool [S']: False where the logits are not numbers
    has_choice: torch.Tensor | None = None  # bool [S']: False where the masks allow no token; None: no masks
    chosen_logprobs: torch.Tensor | None = None  # float32 [A], of the sequences that ask for them
    top_logprobs: torch.Tensor | None = None  # float32 [A, k], descending
    top_token_ids: torch.Tensor | None = None  # int64 [A, k]
    _copied: torch.cuda.Event | None = None  # when the copies of `on_the_way_to_host` are complete

    def on_the_way_to_host(self) -> SampledTokens:
        """Copies in host memory that are complete once `arrived` has been called; nothing here waits."""
        if not self.token_ids.is_cuda:
            return self
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        copies = {name: t.to("cpu", non_blocking=True) for name, t in tensors.items() if isinstance(t, torch.Tensor)}
        copied = torch.cuda.Event()
        copied.record()
        return SampledTokens(**copies, _copied=copied)

    def arrived(self) -> SampledTokens:
        """Wait for the copies."""
        if self._copied is not None:
            self._copied.synchronize()
        return self

    def logprobs_of(self, seqs: list[Sequence]) -> list[TokenLogprob | None]:
        """Per sequence what it asked for, on the host; None for sequences that asked for none."""
        if self.chosen_logprobs is None or self.top_logprobs is None or self.top_token_ids is None:
            return [None] * len(seqs)
        asked = zip(self.chosen_logprobs.tolist(), self.top_logprobs.tolist(), self.top_token_ids.tolist(), strict=True)
        result: list[TokenLogprob | None] = []
        for seq, token_id in zip(seqs, self.token_ids.tolist(), strict=True):
            k = seq.request.sampling.logprobs
            if k is None:
                result.append(None)
                continue
            chosen, values, ids = next(asked)
            top = tuple(one for one in zip(ids[:k], values[:k], strict=True) if one[1] > -inf)
            result.append(TokenLogprob(token_id, chosen, top))
        return result


def sample_tokens(
    logits_SV: torch.Tensor, model_input: ModelInput, rows: SequenceRows, masks: TokenMasks | None = None
) -> SampledTokens:
    """The next token of every sampling sequence. `logits_SV`: float32 [S', V], overwritten.

    Log-probabilities are those of the logits as they come, where `logprobs_over` says so of those that `masks` leave;
    everything else only shapes the choice. Where all `takes_raw_logits`, the logits may be in any dtype.
    """
    seqs = model_input.sampling_seqs
    distinct = list({id(seq.request.sampling): seq.request.sampling for seq in seqs}.values())
    wanted = [params.logprobs for params in distinct if params.logprobs is not None]
    raw = _RawLogits.of(logits_SV, masks, distinct, keep=bool(wanted))
    has_choice = None
    if masks is not None and masks.indices:
        (index_C,) = rows.staging.send(masks.indices)
        ops.apply_token_masks(logits_SV, rows.staging.send_tensor(masks.mask_CW), index_C)
        has_choice = ops.greedy_tokens(logits_SV)[1]
        _keep_allowed(raw.logits_SV, logits_SV, seqs, rows.staging)
    _shape_logits(logits_SV, model_input, rows, distinct)
    token_ids, is_valid = _choose(logits_SV, model_input, rows, distinct)
    sampled = SampledTokens(token_ids, is_valid if raw.is_valid is None else raw.is_valid, has_choice)
    return _with_logprobs(sampled, raw.logits_SV, seqs, max(wanted), rows.staging) if wanted else sampled


class _RawLogits(NamedTuple):
    """What must be kept of the raw logits before they are shaped in place."""

    logits_SV: torch.Tensor
    is_valid: torch.Tensor | None  # bool [S']; None where nothing shapes them

    @classmethod
    def of(
        cls, logits_SV: torch.Tensor, masks: TokenMasks | None, distinct: list[SamplingParams], *, keep: bool
    ) -> _RawLogits:
        if not (masks is not None and masks.indices) and not any(params.shapes_logits for params in distinct):
            return cls(logits_SV, None)
        return cls(logits_SV.clone() if keep else logits_SV, ops.greedy_tokens(logits_SV)[1])


def _keep_allowed(kept_SV: torch.Tensor, masked_SV: torch.Tensor, seqs: list[Sequence], staging: HostStaging) -> None:
    """Put the masked logits in the place of the raw ones for the sequences whose log-probabilities are over those."""
    asking = [i for i, seq in enumerate(seqs) if _asks_for_allowed(seq.request.sampling)]
    if asking:
        (index_A,) = staging.send(asking)
        kept_SV.index_copy_(0, index_A, masked_SV[index_A])


def _asks_for_allowed(params: SamplingParams) -> bool:
    return params.logprobs is not None and params.logprobs_over == "allowed"


def _shape_logits(
    logits_SV: torch.Tensor, model_input: ModelInput, rows: SequenceRows, distinct: list[SamplingParams]
) -> None:
    """Make tokens less or more likely whatever the temperature, in place: biases, too early an end, repetitions."""
    if any(params.logit_bias for params in distinct):
        _add_biases(logits_SV, model_input.sampling_seqs, rows.staging)
    if any(params.min_tokens for params in distinct):
        _forbid_early_end(logits_SV, model_input.sampling_seqs, rows.staging)
    if any(params.has_penalties for params in distinct):
        _penalize(logits_SV, model_input, rows)


def _choose(
    logits_SV: torch.Tensor, model_input: ModelInput, rows: SequenceRows, distinct: list[SamplingParams]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [S'], and which rows hold numbers: the likeliest ones, or drawn with the filters that somebody wants."""
    random = [params for params in distinct if not params.greedy]  # others take their maximum, whatever is cut
    if not random:
        return ops.greedy_tokens(logits_SV)
    row_S = model_input.sampling_rows
    return ops.draw_tokens(
        logits_SV,
        rows.temperature[row_S],
        rows.seed[row_S],
        model_input.num_tokens,
        min_p_S=rows.min_p[row_S] if any(params.min_p for params in random) else None,
        top_k_S=rows.top_k[row_S] if any(params.top_k > 0 for params in random) else None,
        top_p_S=rows.top_p[row_S] if any(params.top_p < 1 for params in random) else None,
    )


def _add_biases(logits_SV: torch.Tensor, seqs: list[Sequence], staging: HostStaging) -> None:
    given = [(i, *pair) for i, seq in enumerate(seqs) for pair in seq.request.sampling.logit_bias]
    row_B, token_B = staging.send([i for i, _, _ in given], [token_id for _, token_id, _ in given])
    bias_B = staging.send_array(array("f", [bias for _, _, bias in given]), torch.float32)
    logits_SV[row_B, token_B] += bias_B  # a sequence has one bias for a token


def _forbid_early_end(logits_SV: torch.Tensor, seqs: list[Sequence], staging: HostStaging) -> None:
    """Take the ending tokens away from the A sequences below their `min_tokens`, unless nothing else is left."""
    early = [i for i, seq in enumerate(seqs) if seq.late_token_ids and _is_early(seq)]
    if not early:
        return
    pairs = [(i, token_id) for i in early for token_id in seqs[i].late_token_ids]
    index_A, *ends = staging.send(early, [i for i, _ in pairs], [token_id for _, token_id in pairs])
    ends_before = logits_SV[ends[0], ends[1]]
    logits_SV[ends[0], ends[1]] = torch.full_like(ends_before, float("-inf"))  # a number would be copied: torch waits
    must_end_S = torch.zeros(len(seqs), dtype=torch.bool, device=logits_SV.device)  # its constraint allows no other
    must_end_S[index_A] = logits_SV[index_A].amax(-1) == float("-inf")
    logits_SV[ends[0], ends[1]] = torch.where(must_end_S[ends[0]], ends_before, float("-inf"))


def _is_early(seq: Sequence) -> bool:
    return seq.num_tokens - seq.num_prompt_tokens < seq.request.sampling.min_tokens


def _penalize(logits_SV: torch.Tensor, model_input: ModelInput, rows: SequenceRows) -> None:
    """Penalties for the A sequences that have some."""
    seqs = model_input.sampling_seqs
    asking = [i for i, seq in enumerate(seqs) if seq.request.sampling.has_penalties]
    (index_A,) = rows.staging.send(asking)
    row_A = model_input.sampling_rows[index_A]
    ops.apply_penalties(
        logits_SV,
        index_A,
        rows.token_ids_RL[row_A, : max(seqs[i].num_tokens for i in asking)],
        rows.prompt_len[row_A],
        model_input.num_tokens[index_A],
        presence_A=rows.presence[row_A],
        frequency_A=rows.frequency[row_A],
        repetition_A=rows.repetition[row_A],
    )


def _with_logprobs(
    sampled: SampledTokens, logits_SV: torch.Tensor, seqs: list[Sequence], k: int, staging: HostStaging
) -> SampledTokens:
    """The same with the log-probabilities, and those of the k likeliest tokens, for the A sequences that ask."""
    asking, token_A = [i for i, seq in enumerate(seqs) if seq.request.sampling.logprobs is not None], sampled.token_ids
    if len(asking) < len(seqs):
        (index_A,) = staging.send(asking)
        logits_SV, token_A = logits_SV[index_A], token_A[index_A]
    chosen, values, ids = ops.token_logprobs(logits_SV, token_A, min(k, logits_SV.shape[-1]))
    return replace(sampled, chosen_logprobs=chosen, top_logprobs=values, top_token_ids=ids)
