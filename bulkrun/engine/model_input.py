"""What the model computes in one step, built on the device from what already lives there.

A running sequence owns one permanent row of the device tensors: its tokens (prompt and sampled), its block table,
its sampling parameters. The host sends only a step's difference: the rows of new sequences, new block ids, and which
row computes how many tokens from where. Everything per token is worked out by tensor operations. Knows no scheduling.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import accumulate

import torch

from bulkrun.engine.config import EngineConfig
from bulkrun.engine.scheduler import KVCopy, ScheduledBatch
from bulkrun.engine.sequence import Sequence
from bulkrun.ops.attention_metadata import NULL_BLOCK, AttentionMetadata


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One step for the model and the sampler. S' are the sequences that sample, in batch order."""

    input_ids_T: torch.Tensor  # int32
    positions_T: torch.Tensor  # int64
    meta: AttentionMetadata
    sampling_seqs: list[Sequence]  # S', on the host
    sampling_rows: torch.Tensor  # int64 [S']: their rows
    logits_indices: torch.Tensor  # int64 [S']: their last tokens among the T
    num_tokens: torch.Tensor  # int64 [S']: their tokens so far, which is the new token's position


class SequenceRows:
    """The permanent rows [R] of the device, L tokens and M blocks wide. `floats` and `ints` are sampling parameters."""

    def __init__(self, config: EngineConfig) -> None:
        rows, device = config.max_num_seqs, config.device
        self.block_size = config.block_size
        self.token_ids_RL = torch.zeros(rows, config.max_model_len, dtype=torch.int32, device=device)
        shape = (rows, config.max_blocks_per_seq)
        self.block_tables_RM = torch.full(shape, NULL_BLOCK, dtype=torch.int32, device=device)
        self.temperature, self.top_p, self.min_p, self.presence, self.frequency, self.repetition = torch.zeros(
            6, rows, device=device
        )
        self.seed, self.top_k, self.prompt_len = torch.zeros(3, rows, dtype=torch.int64, device=device)

    def apply(self, batch: ScheduledBatch) -> None:
        """Bring the rows up to date with a step's new sequences and new blocks."""
        if batch.new_seqs:
            self._fill_rows(batch.new_seqs)
        if batch.block_table_updates:
            row, index, block_id = self.send(batch.block_table_updates, torch.int64).unbind(1)
            self.block_tables_RM[row, index] = block_id.int()

    def append(self, rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Write sampled tokens, int64 [S'] each, where the next step reads them."""
        self.token_ids_RL[rows, positions] = token_ids.int()

    def _fill_rows(self, seqs: list[Sequence]) -> None:
        lengths = [seq.num_tokens for seq in seqs]
        tokens = array("i")
        for seq in seqs:
            tokens.extend(seq.token_ids)
        rows = self.send([seq.row for seq in seqs], torch.int64)
        counts = self.send(lengths, torch.int64)
        row_of_token, offset = _ragged(counts, sum(lengths))
        tokens_on_device = torch.frombuffer(tokens, dtype=torch.int32).to(rows.device, non_blocking=True)
        self.token_ids_RL[rows[row_of_token], offset] = tokens_on_device
        self.block_tables_RM[rows] = NULL_BLOCK
        self._fill_sampling_parameters(seqs, rows)

    def _fill_sampling_parameters(self, seqs: list[Sequence], rows: torch.Tensor) -> None:
        floats, ints = [], []
        for seq in seqs:
            p = seq.request.sampling
            floats.append(
                (p.temperature, p.top_p, p.min_p, p.presence_penalty, p.frequency_penalty, p.repetition_penalty)
            )
            ints.append((seq.request.seed, p.top_k, seq.num_prompt_tokens))
        targets = (self.temperature, self.top_p, self.min_p, self.presence, self.frequency, self.repetition)
        for target, values in zip(targets, self.send(floats, torch.float32).unbind(1), strict=True):
            target[rows] = values
        for target, values in zip(
            (self.seed, self.top_k, self.prompt_len), self.send(ints, torch.int64).unbind(1), strict=True
        ):
            target[rows] = values

    def send(self, values: object, dtype: torch.dtype) -> torch.Tensor:
        """A host list as a tensor on the rows' device."""
        return torch.tensor(values, dtype=dtype).to(self.token_ids_RL.device, non_blocking=True)


def build_model_input(rows: SequenceRows, batch: ScheduledBatch) -> ModelInput:
    """Tensors of one step; `rows` must have been brought up to date with the same batch."""
    counts, starts = batch.num_scheduled_tokens, batch.starts
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    samples = [i for i in range(len(batch.seqs)) if batch.samples(i)]
    offsets = list(accumulate(counts, initial=0))
    packed = rows.send([[seq.row for seq in batch.seqs], starts, counts, ends, offsets[:-1]], torch.int64)
    row_S, start_S, count_S, end_S, offset_S = packed.unbind(0)
    seq_T, index_T = _ragged(count_S, offsets[-1])
    row_T, positions_T = row_S[seq_T], start_S[seq_T] + index_T
    block_T = rows.block_tables_RM[row_T, positions_T // rows.block_size].long()
    max_context_len = max(ends)
    num_blocks = -(-max_context_len // rows.block_size)
    meta = AttentionMetadata(
        slot_mapping_T=block_T * rows.block_size + positions_T % rows.block_size,
        block_tables_SM=rows.block_tables_RM[row_S, :num_blocks],
        context_lens_S=end_S.int(),
        cu_seqlens_q=torch.cat((offset_S, offset_S[-1:] + count_S[-1:])).int(),
        num_decode_seqs=batch.num_decode_seqs,
        max_query_len=max(counts),
        max_context_len=max_context_len,
        kv_copies=_slots_to_copy(rows, batch.kv_copies) if batch.kv_copies else None,
    )
    everyone = len(samples) == len(batch.seqs)
    sampling_S = slice(None) if everyone else rows.send(samples, torch.int64)
    return ModelInput(
        input_ids_T=rows.token_ids_RL[row_T, positions_T],
        positions_T=positions_T,
        meta=meta,
        sampling_seqs=batch.seqs if everyone else [batch.seqs[i] for i in samples],
        sampling_rows=row_S[sampling_S],
        logits_indices=(offset_S + count_S - 1)[sampling_S],
        num_tokens=end_S[sampling_S],
    )


def _slots_to_copy(rows: SequenceRows, kv_copies: list[KVCopy]) -> torch.Tensor:
    """Slots to copy from and to, int64 [2, C]."""
    source, target, count = rows.send(kv_copies, torch.int64).unbind(1)
    owner, offset = _ragged(count, sum(copy.num_tokens for copy in kv_copies))
    return torch.stack((source, target))[:, owner] * rows.block_size + offset


def _ragged(counts: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For `counts` [S] items each: which owner (int64 [total]) every item has and which of its items it is."""
    device = counts.device
    owner = torch.arange(counts.numel(), device=device)
    if total == counts.numel():  # one item each: a step of decoding only
        return owner, torch.zeros_like(owner)
    owner = torch.repeat_interleave(owner, counts, output_size=total)
    first = counts.cumsum(0) - counts
    return owner, torch.arange(total, device=device) - first[owner]
