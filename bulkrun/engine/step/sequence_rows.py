"""What the device keeps of each running sequence: its tokens, its block table, its sampling parameters.

A running sequence owns one permanent row of these tensors, so the host sends only differences: rows of new sequences,
new block ids. Sampled tokens are written by the device itself, where the next step reads them. Knows no scheduling.
"""

from __future__ import annotations

from array import array
from itertools import chain

import torch

from bulkrun import ops
from bulkrun.blocks import NULL_BLOCK
from bulkrun.engine.config import EngineConfig
from bulkrun.engine.scheduling.scheduled_batch import ScheduledBatch
from bulkrun.engine.scheduling.sequence import Sequence
from bulkrun.engine.step.staging import HostStaging
from bulkrun.models.host_memory import untouched_zeros
from bulkrun.ops import StepBuffers
from bulkrun.request import SamplingParams


class SequenceRows:
    """The permanent rows [R] of the device, L tokens and M blocks wide; one number each of the sampling parameters."""

    def __init__(self, config: EngineConfig) -> None:
        rows, device = config.max_num_seqs, config.device
        self.device = device
        self.block_size = config.block_size
        self.staging = HostStaging(device)
        self.token_ids_RL = _zeros((rows, config.max_model_len), device)
        self.block_tables_RM = _zeros((rows, config.max_blocks_per_seq), device)  # zero is the null block
        self.temperature, self.top_p, self.min_p, self.presence, self.frequency, self.repetition = torch.zeros(
            6, rows, device=device
        )
        self._step_buffers = StepBuffers.allocate(0, 0, 0, device)
        self.seed, self.top_k, self.prompt_len = torch.zeros(3, rows, dtype=torch.int64, device=device)

    def step_buffers(self, num_tokens: int, num_seqs: int, num_blocks: int) -> StepBuffers:
        """Room for a step of these sizes: that of the step before, which the device has done by then, if it fits."""
        if not self._step_buffers.has_sizes(num_tokens, num_seqs, num_blocks):
            self._step_buffers = StepBuffers.allocate(num_tokens, num_seqs, num_blocks, self.device)
        return self._step_buffers

    def apply(self, batch: ScheduledBatch) -> None:
        """Fill the rows of a step's new sequences. Their blocks come with everybody's new ones: see `write_blocks`."""
        if batch.new_seqs:
            self._fill_rows(batch.new_seqs)

    def new_blocks(self, batch: ScheduledBatch) -> tuple[list[int], list[int]]:
        """A step's new blocks for `write_blocks`: places in the block tables, read row by row, and block ids."""
        width = self.block_tables_RM.shape[1]
        updates = batch.block_table_updates
        return [row * width + index for row, index, _ in updates], [block_id for *_, block_id in updates]

    def write_blocks(self, places: torch.Tensor, block_ids: torch.Tensor) -> None:
        """Put block ids in their places, int64 [U] each."""
        if places.numel():
            self.block_tables_RM.view(-1).index_copy_(0, places, block_ids.int())

    def new_tokens(self, batch: ScheduledBatch) -> tuple[list[int], list[int]]:
        """Tokens that no step has sampled, for `write_tokens`: places in the rows, read row by row, and token ids."""
        width, updates = self.token_ids_RL.shape[1], batch.token_updates
        return [row * width + position for row, position, _ in updates], [token_id for *_, token_id in updates]

    def write_tokens(self, places: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Put token ids in their places, int64 [U] each; a token that was sampled for such a place is overwritten."""
        if places.numel():
            self.token_ids_RL.view(-1).index_copy_(0, places, token_ids.int())

    def append(self, rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Write sampled tokens, int64 [S'] each, where the next step reads them."""
        ops.append_tokens(self.token_ids_RL, rows, positions, token_ids)

    def _fill_rows(self, seqs: list[Sequence]) -> None:
        rows, counts, *ints = self.staging.send(
            [seq.running_row for seq in seqs],
            [len(seq.token_ids) for seq in seqs],
            [seq.request.seed for seq in seqs],
            [seq.request.sampling.top_k for seq in seqs],
            [seq.num_prompt_tokens for seq in seqs],
        )
        self._fill_tokens(rows, counts, seqs)
        self.block_tables_RM.index_fill_(0, rows, NULL_BLOCK)  # assigned, the number would be copied: torch waits
        for target, values in zip((self.seed, self.top_k, self.prompt_len), ints, strict=True):
            target[rows] = values
        self._fill_floats(rows, [seq.request.sampling for seq in seqs])

    def _fill_tokens(self, rows: torch.Tensor, counts: torch.Tensor, seqs: list[Sequence]) -> None:
        tokens = array("i")
        for seq in seqs:
            tokens.extend(seq.token_ids)
        row_of_token, offset = ragged(counts, len(tokens))
        self.token_ids_RL[rows[row_of_token], offset] = self.staging.send_array(tokens, torch.int32)

    def _fill_floats(self, rows: torch.Tensor, params: list[SamplingParams]) -> None:
        floats = [
            (
                0.0 if p.greedy else p.temperature,
                p.top_p,
                p.min_p,
                p.presence_penalty,
                p.frequency_penalty,
                p.repetition_penalty,
            )
            for p in params
        ]
        targets = (self.temperature, self.top_p, self.min_p, self.presence, self.frequency, self.repetition)
        sent = self.staging.send_array(array("f", chain.from_iterable(floats)), torch.float32).view(-1, len(targets))
        for target, values in zip(targets, sent.unbind(1), strict=True):
            target[rows] = values


def ragged(counts: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For `counts` [S] items each: which owner (int64 [total]) every item has and which of its items it is."""
    device = counts.device
    owner = torch.arange(counts.numel(), device=device)
    if total == counts.numel():  # one item each: a step of decoding only
        return owner, torch.zeros_like(owner)
    owner = torch.repeat_interleave(owner, counts, output_size=total)
    first = counts.cumsum(0) - counts
    return owner, torch.arange(total, device=device) - first[owner]


def _zeros(shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    """On a CPU rows that no sequence ever had take no memory: there may be many, and each is as long as the longest."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=torch.int32, device=device)
    return untouched_zeros(shape, torch.int32, huge_pages=False)
