"""Runs the model over one scheduled step: rows up to date, forward, logits of the rows that sample, tokens.

Owns the device side: the weights, the KV cache, the permanent rows. Knows no queues and no stop conditions.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import NamedTuple

import torch

from bulkrun.blocks import NULL_BLOCK
from bulkrun.engine.config import EngineConfig
from bulkrun.engine.memory_errors import is_out_of_memory
from bulkrun.engine.scheduling.scheduled_batch import ScheduledBatch, StateCopy
from bulkrun.engine.scheduling.sequence import Sequence
from bulkrun.engine.step.cuda_graphs import CudaCapture, StepGraphs
from bulkrun.engine.step.model_input import ModelInput, build_model_input
from bulkrun.engine.step.pending_step import PendingStep
from bulkrun.engine.step.prompt_logprobs import add_prompt_logprobs, asks_for_prompt_logprobs
from bulkrun.engine.step.sampler import sample_tokens
from bulkrun.engine.step.sequence_rows import SequenceRows
from bulkrun.engine.step.shared_prefixes import SharedPrefixTable
from bulkrun.engine.step.step_shape import CapturedShapes, max_captured_tokens
from bulkrun.engine.step.token_masks import PendingMasks
from bulkrun.errors import first_line
from bulkrun.models.kv_cache import KVCache
from bulkrun.models.language_model import LanguageModel
from bulkrun.models.recurrent_state import RecurrentState
from bulkrun.ops.attention.metadata import TILE_ROWS


class StepLogits(NamedTuple):
    """What the tokens of a step are chosen from, on the device, or on its way."""

    model_input: ModelInput
    logits_SV: torch.Tensor | None  # [S', V]; None where nobody samples


class ModelRunner:
    """Device state, and a step in two halves: the forward pass, and the choice of tokens."""

    def __init__(self, model: LanguageModel, config: EngineConfig) -> None:
        self.model = model
        self.rows = SequenceRows(config)
        self._config = config
        self.prefixes = self._prefix_table() if config.device.type == "cuda" else None
        self.kv_cache = self._allocate(config.num_blocks)
        self.graphs = self._capture()

    def forget_step(self) -> None:
        """After a step that did not end: it may have written shared prefixes which nobody knows of."""
        if self.prefixes is not None:
            self.prefixes.clear()

    def restart(self, config: EngineConfig) -> None:
        """Free the pool and take one of another size, for steps of another size; what it held is gone.

        Raises what the allocator raises.
        """
        self._config = config
        self.forget_step()
        self.graphs = None  # they read the old one
        self.kv_cache = replace(self.kv_cache, k=[], v=[], states=[])  # the old one goes before the new one comes
        if config.device.type == "cuda":
            torch.cuda.empty_cache()
        self.kv_cache = self._allocate(config.num_blocks)
        self.graphs = self._capture()

    def _capture(self) -> StepGraphs | None:
        """Graphs for the steps that are worth it, where there is a GPU and the model can be captured."""
        config = self._config
        if config.device.type != "cuda" or config.enforce_eager or not self.model.is_capturable:
            return None
        most, is_in_fp8 = config.max_num_batched_tokens, self.model.is_in_fp8
        max_tokens = max_captured_tokens(self.model.config, most, is_in_fp8=is_in_fp8)
        try:
            graphs = StepGraphs(
                self.model,
                self.kv_cache,
                CapturedShapes(config.max_num_seqs, max_tokens, config.max_model_len),
                max_blocks_per_seq=config.max_blocks_per_seq,
                prefixes=self.prefixes,
                capture=CudaCapture(config.device),
            )
        except RuntimeError as error:  # an operator, a driver: the same kernels run without
            if is_out_of_memory(error):
                raise
            logging.getLogger(__name__).warning(
                "no CUDA graphs, steps are launched kernel by kernel (engine.enforce_eager): %s", first_line(error)
            )
            return None
        torch.cuda.empty_cache()  # used by the runs before capturing
        return graphs

    def _prefix_table(self) -> SharedPrefixTable | None:
        """Where the prefix cache is on, without which sequences share no blocks, and layers attend to them."""
        if not self._config.enable_prefix_caching or not self.model.config.layers_kv:
            return None
        group = self.model.config.num_heads // self.model.config.num_kv_heads
        seqs_per_tile = max(TILE_ROWS // group, 1)
        config = self._config
        return SharedPrefixTable(config.max_num_seqs, config.block_size, seqs_per_tile, self.rows.staging)

    def _allocate(self, num_blocks: int) -> KVCache:
        config, model = self._config, self.model
        cache = KVCache.allocate(model.config, num_blocks, config.block_size, config.kv_cache_dtype, config.device)
        cache.states = RecurrentState.allocate(model.config, config.num_state_rows, model.dtype, config.device)
        return cache

    @torch.inference_mode()
    def compute(self, batch: ScheduledBatch) -> StepLogits:
        """Put one step's forward pass on its way; nothing waits for the device, unless log-probabilities are wanted.

        Sequences that ask for the log-probabilities of their prompt get those of the prompt tokens predicted here.
        """
        self.rows.apply(batch)
        new_blocks = (block_id for *_, block_id in batch.block_table_updates)
        self.kv_cache.touch(1 + max(new_blocks, default=NULL_BLOCK))
        model_input = self._model_input(batch)
        self._copy_states(batch.state_loads)
        hidden_SE = self._forward(model_input, batch)
        self._copy_states(batch.state_saves)
        seqs = model_input.sampling_seqs
        return StepLogits(model_input, self._logits(hidden_SE, seqs) if seqs else None)

    @torch.inference_mode()
    def sample(self, step: StepLogits, pending_masks: PendingMasks | None = None) -> PendingStep:
        """Choose the tokens of a step whose forward pass is on its way; waits for nothing but the masks."""
        model_input, logits_SV = step
        if logits_SV is None:
            return PendingStep([])
        masks = None if pending_masks is None else pending_masks.result()
        sampled = sample_tokens(logits_SV, model_input, self.rows, masks)
        self.rows.append(model_input.sampling_rows, model_input.num_tokens, sampled.token_ids)
        return PendingStep(model_input.sampling_seqs, sampled, masks)

    def _model_input(self, batch: ScheduledBatch) -> ModelInput:
        """The step's tensors: where a captured step reads them if one has room for it, else of its own size."""
        if self.prefixes is not None:
            self.prefixes.update(batch)
        shape = None if self.graphs is None else self.graphs.shape_for(batch)
        if self.graphs is not None and shape is not None:
            return build_model_input(self.rows, batch, shape, self.graphs.buffers(shape))
        shared = None
        if self.prefixes is not None and self.prefixes.groups:
            shared = self.prefixes.view(batch.num_decode_seqs)
        return build_model_input(self.rows, batch, shared_prefixes=shared)

    def _forward(self, model_input: ModelInput, batch: ScheduledBatch) -> torch.Tensor:
        """Hidden states [S', E] of the tokens that are sampled from; afterwards the cache has all keys and values."""
        num_sampling, indices = len(model_input.sampling_seqs), model_input.logits_indices
        if self.graphs is not None and model_input.is_captured:
            hidden_TE = self.graphs.replay(model_input.shape)
        else:
            wants_all = num_sampling == len(model_input.input_ids_T) or asks_for_prompt_logprobs(batch)
            inputs = (model_input.input_ids_T, model_input.positions_T, self.kv_cache, model_input.meta)
            hidden_TE = self.model(*inputs, None if wants_all else indices)
            if not wants_all:
                return hidden_TE
        add_prompt_logprobs(self.model, hidden_TE, batch)
        return hidden_TE if num_sampling == len(hidden_TE) else hidden_TE[indices]

    def _copy_states(self, copies: list[StateCopy]) -> None:
        """All copies at once in each layer that keeps some: only steps in which somebody begins have any."""
        if copies:
            source, target = self.rows.staging.send(*zip(*copies, strict=True))
            for state in self.kv_cache.states:
                state.copy_rows(source, target)

    def _logits(self, hidden_SE: torch.Tensor, seqs: SequenceOf[Sequence]) -> torch.Tensor:
        """Logits [S', V], in the head's dtype where nothing shapes them: float32 would double the memory."""
        as_computed = all(seq.takes_raw_logits for seq in seqs)
        return self.model.compute_logits(hidden_SE, as_computed=as_computed)

    @torch.inference_mode()
    def clear_blocks(self, block_ids: SequenceOf[int]) -> None:
        """Zero blocks whose content is not numbers: their next owner masks stale slots, but 0 * NaN is NaN."""
        index = torch.tensor(block_ids, dtype=torch.int64).to(self.kv_cache.device)
        self.kv_cache.clear_blocks(index)
