"""Runs the model over one scheduled step: rows up to date, forward, logits of the rows that sample, tokens.

Owns the device side: the weights, the KV cache, the permanent rows. Knows no queues and no stop conditions.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import torch

from bulkrun.engine.config import EngineConfig
from bulkrun.engine.model_input import SequenceRows, build_model_input
from bulkrun.engine.prompt_logprobs import add_prompt_logprobs
from bulkrun.engine.sampler import SampledTokens, sample_tokens
from bulkrun.engine.scheduler import ScheduledBatch
from bulkrun.engine.sequence import Sequence
from bulkrun.engine.token_masks import PendingMasks, TokenMasks
from bulkrun.models.kv_cache import KVCache
from bulkrun.models.language_model import LanguageModel
from bulkrun.request import TokenLogprob

_DEAD_END = "the grammar allows none of the model's tokens to come next; check that its text can be written with them"


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What the host needs of a step: parallel lists over the sequences that sampled."""

    seqs: list[Sequence]
    token_ids: list[int]
    is_valid: list[bool]  # False where the model's logits were not numbers
    logprobs: list[TokenLogprob | None]
    grammar_errors: dict[int, str] = field(default_factory=dict)  # index -> why its token must not be taken


class ModelRunner:
    """Device state and the one function that advances it."""

    def __init__(self, model: LanguageModel, config: EngineConfig) -> None:
        self.model = model
        self.rows = SequenceRows(config)
        self.kv_cache = KVCache.allocate(
            model.config, config.num_blocks, config.block_size, config.dtype, config.device
        )

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch, pending_masks: PendingMasks | None = None) -> StepOutput:
        """Compute the batch's tokens and sample for the sequences that are due.

        Masks are waited for when everything before them is on its way. Sequences that ask for the log-probabilities of
        their prompt get those of the prompt tokens predicted here.
        """
        self.rows.apply(batch)
        model_input = build_model_input(self.rows, batch)
        hidden_TE = self.model(model_input.input_ids_T, model_input.positions_T, self.kv_cache, model_input.meta)
        add_prompt_logprobs(self.model, hidden_TE, batch)
        seqs = model_input.sampling_seqs
        if not seqs:
            return StepOutput([], [], [], [])
        logits_SV = self.model.compute_logits(hidden_TE[model_input.logits_indices])
        masks = None if pending_masks is None else pending_masks.result()
        sampled = sample_tokens(logits_SV, model_input, self.rows, masks)
        self.rows.append(model_input.sampling_rows, model_input.num_tokens, sampled.token_ids)
        return StepOutput(
            seqs,
            sampled.token_ids.tolist(),
            sampled.is_valid.tolist(),
            sampled.logprobs_on_host(seqs),
            {} if masks is None else _grammar_errors(masks, sampled),
        )

    @torch.inference_mode()
    def clear_blocks(self, block_ids: SequenceOf[int]) -> None:
        """Zero blocks whose content is not numbers: their next owner masks stale slots, but 0 * NaN is NaN."""
        index = torch.tensor(block_ids, dtype=torch.int64).to(self.kv_cache.k[0].device)
        for cache in (*self.kv_cache.k, *self.kv_cache.v):
            cache.index_fill_(0, index, 0)


def _grammar_errors(masks: TokenMasks, sampled: SampledTokens) -> dict[int, str]:
    """Whose constraint failed, or left no token at all, in which case the sampled one means nothing."""
    has_choice = [] if sampled.has_choice is None else sampled.has_choice.tolist()
    dead_ends = {index: _DEAD_END for index, has in enumerate(has_choice) if not has}
    return dead_ends | masks.errors
