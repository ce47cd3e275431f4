"""What the model computes in one step, built on the device from what already lives there.

The host sends one packed copy: which row computes how many tokens from where, new block ids, and whose last token is
sampled from. Everything per token is worked out by `ops.step_inputs`, into buffers of the step's own size or into those
of a larger, captured step. Knows no scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from bulkrun import ops
from bulkrun.engine.scheduling.scheduled_batch import KVCopy, ScheduledBatch
from bulkrun.engine.scheduling.sequence import Sequence
from bulkrun.engine.step.sequence_rows import SequenceRows, ragged
from bulkrun.engine.step.step_shape import StepShape
from bulkrun.ops import AttentionMetadata, StepBuffers
from bulkrun.ops.attention.metadata import SharedPrefixes


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One step for the model and the sampler. S' are the sequences that sample, in batch order."""

    input_ids_T: torch.Tensor  # int32
    positions_T: torch.Tensor  # int64
    meta: AttentionMetadata
    shape: StepShape
    is_captured: bool  # it lies in the buffers of a captured step, padded
    sampling_seqs: list[Sequence]  # S', on the host
    sampling_rows: torch.Tensor  # int64 [S']: their rows
    logits_indices: torch.Tensor  # int64 [S']: their last tokens among the T
    num_tokens: torch.Tensor  # int64 [S']: their tokens so far, which is the new token's position


def build_model_input(
    rows: SequenceRows,
    batch: ScheduledBatch,
    shape: StepShape | None = None,
    buffers: StepBuffers | None = None,
    shared_prefixes: SharedPrefixes | None = None,
) -> ModelInput:
    """Tensors of one step; `rows` must have been brought up to date with the same batch.

    shape, buffers: those of a captured step that has room for this one, to pad it to; None: the step's own.
    """
    is_captured = shape is not None
    shape = shape or StepShape.of(batch)
    if buffers is None:
        num_blocks = -(-shape.max_context_len // rows.block_size)
        buffers = rows.step_buffers(shape.num_tokens, shape.num_seqs, num_blocks)
    sampling_seqs = batch.sampling_seqs()
    sequences, sampling_rows, logits_indices, num_tokens, blocks_at, block_ids, tokens_at, token_ids = (
        rows.staging.send(
            _padded_sequences(batch, shape),
            [seq.running_row for seq in sampling_seqs],
            *_last_tokens(batch),
            *rows.new_blocks(batch),
            *rows.new_tokens(batch),
        )
    )
    rows.write_blocks(blocks_at, block_ids)
    rows.write_tokens(tokens_at, token_ids)
    packed_3S = sequences.view(3, shape.num_seqs)
    ops.step_inputs(rows.token_ids_RL, rows.block_tables_RM, packed_3S, buffers, block_size=rows.block_size)
    kv_copies = _slots_to_copy(rows, batch.kv_copies) if batch.kv_copies else None
    return ModelInput(
        input_ids_T=buffers.input_ids_T,
        positions_T=buffers.positions_T,
        meta=step_metadata(buffers, shape, kv_copies, shared_prefixes, is_padded=is_captured),
        shape=shape,
        is_captured=is_captured,
        sampling_seqs=sampling_seqs,
        sampling_rows=sampling_rows,
        logits_indices=logits_indices,
        num_tokens=num_tokens,
    )


def step_metadata(
    buffers: StepBuffers,
    shape: StepShape,
    kv_copies: torch.Tensor | None = None,
    shared_prefixes: SharedPrefixes | None = None,
    *,
    is_padded: bool,
) -> AttentionMetadata:
    """What attention must know of a step that lies in `buffers`."""
    return AttentionMetadata(
        slot_mapping_T=buffers.slot_mapping_T,
        block_tables_SM=buffers.block_tables_SM,
        context_lens_S=buffers.context_lens_S,
        cu_seqlens_q=buffers.cu_seqlens_q,
        num_decode_seqs=shape.num_decode_seqs,
        max_query_len=shape.max_query_len,
        max_context_len=shape.max_context_len,
        max_decode_keys=shape.max_decode_keys,
        kv_copies=kv_copies,
        shared_prefixes=shared_prefixes,
        rows_S=buffers.rows_S,
        is_padded=is_padded,
    )


def _padded_sequences(batch: ScheduledBatch, shape: StepShape) -> list[int]:
    """Rows, starts and counts of the sequences, one after the other; those that pad each kind compute nothing."""
    decode = batch.num_decode_seqs
    no_decode = [0] * (shape.num_decode_seqs - decode)
    no_chunk = [0] * (shape.num_seqs - shape.num_decode_seqs - len(batch.seqs) + decode)
    packed: list[int] = []
    for values in ([seq.running_row for seq in batch.seqs], batch.starts, batch.num_scheduled_tokens):
        packed += [*values[:decode], *no_decode, *values[decode:], *no_chunk]
    return packed


def _last_tokens(batch: ScheduledBatch) -> tuple[list[int], list[int]]:
    """Of the sequences that sample: where the last token is among the step's, and how many tokens there are so far."""
    samples, ends = batch.sampling_indices(), list(accumulate(batch.num_scheduled_tokens))
    num_tokens = [batch.starts[i] + batch.num_scheduled_tokens[i] for i in samples]
    return [ends[i] - 1 for i in samples], num_tokens


def _slots_to_copy(rows: SequenceRows, kv_copies: list[KVCopy]) -> torch.Tensor:
    """Slots to copy from and to, int64 [2, C]."""
    source, target, count = rows.staging.send(*zip(*kv_copies, strict=True))
    owner, offset = ragged(count, sum(copy.num_tokens for copy in kv_copies))
    return torch.stack((source, target))[:, owner] * rows.block_size + offset
