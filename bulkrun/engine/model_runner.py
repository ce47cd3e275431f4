"""Runs the model over one scheduled step: rows up to date, forward, logits of the rows that sample, tokens.

Owns the device side: the weights, the KV cache, the permanent rows. Knows no queues and no stop conditions.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from bulkrun.engine.config import EngineConfig
from bulkrun.engine.model_input import SequenceRows, build_model_input
from bulkrun.engine.sampler import sample_tokens
from bulkrun.engine.scheduler import ScheduledBatch
from bulkrun.engine.sequence import Sequence
from bulkrun.models.decoder import Decoder
from bulkrun.models.kv_cache import KVCache
from bulkrun.request import TokenLogprob


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What the host needs of a step: parallel lists over the sequences that sampled."""

    seqs: list[Sequence]
    token_ids: list[int]
    is_valid: list[bool]  # False where the model's logits were not numbers
    logprobs: list[TokenLogprob | None]


class ModelRunner:
    """Device state and the one function that advances it."""

    def __init__(self, model: Decoder, config: EngineConfig) -> None:
        self.model = model
        self.rows = SequenceRows(config)
        self.kv_cache = KVCache.allocate(
            model.config, config.num_blocks, config.block_size, config.dtype, config.device
        )

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """Compute the batch's tokens and sample for the sequences that are due."""
        self.rows.apply(batch)
        model_input = build_model_input(self.rows, batch)
        hidden_TE = self.model(model_input.input_ids_T, model_input.positions_T, self.kv_cache, model_input.meta)
        seqs = model_input.sampling_seqs
        if not seqs:
            return StepOutput([], [], [], [])
        logits_SV = self.model.compute_logits(hidden_TE[model_input.logits_indices])
        sampled = sample_tokens(logits_SV, model_input, self.rows)
        self.rows.append(model_input.sampling_rows, model_input.num_tokens, sampled.token_ids)
        return StepOutput(seqs, sampled.token_ids.tolist(), sampled.is_valid.tolist(), sampled.logprobs_on_host(seqs))

    @torch.inference_mode()
    def clear_blocks(self, block_ids: SequenceOf[int]) -> None:
        """Zero blocks whose content is not numbers: their next owner masks stale slots, but 0 * NaN is NaN."""
        index = torch.tensor(block_ids, dtype=torch.int64).to(self.kv_cache.k[0].device)
        for cache in (*self.kv_cache.k, *self.kv_cache.v):
            cache.index_fill_(0, index, 0)
