"""One step's work as plain data: what the scheduler decides and the model runner does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from bulkrun.engine.scheduling.sequence import Sequence


class KVCopy(NamedTuple):
    """The first `num_tokens` slots of one block go to another one, in every layer, once the step's KV is stored."""

    source: int
    target: int
    num_tokens: int


class StateCopy(NamedTuple):
    """The recurrent states of one row go to another one, in every layer that has some."""

    source: int
    target: int


@dataclass(slots=True)
class ScheduledBatch:
    """One step. Sequences that decode come first; the lists are parallel, one entry per sequence."""

    seqs: list[Sequence] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # position of the first token to compute
    num_scheduled_tokens: list[int] = field(default_factory=list)
    num_decode_seqs: int = 0  # the first so many have one token, their last one
    new_seqs: list[Sequence] = field(default_factory=list)  # got their row in this step
    block_table_updates: list[tuple[int, int, int]] = field(default_factory=list)  # row, index, block id
    token_updates: list[tuple[int, int, int]] = field(default_factory=list)  # row, position, token id
    kv_copies: list[KVCopy] = field(default_factory=list)
    state_loads: list[StateCopy] = field(default_factory=list)  # before the step
    state_saves: list[StateCopy] = field(default_factory=list)  # after it

    @property
    def num_tokens(self) -> int:
        """Tokens to compute in this step, over all sequences."""
        return sum(self.num_scheduled_tokens)

    def append(self, seq: Sequence, count: int) -> None:
        """Have a running sequence compute its next `count` tokens; the device gets those that it lacks."""
        self.seqs.append(seq)
        self.starts.append(seq.num_computed_tokens)
        self.num_scheduled_tokens.append(count)
        if seq.num_unsent_tokens:
            self._send_tokens(seq)

    def _send_tokens(self, seq: Sequence) -> None:
        row, first = seq.running_row, len(seq.token_ids) - seq.num_unsent_tokens
        self.token_updates += [(row, first + i, token_id) for i, token_id in enumerate(seq.token_ids[first:])]
        seq.num_unsent_tokens = 0

    def sampling_indices(self) -> list[int]:
        """Indices of the sequences that `samples`: those that decode, and those whose prompt ends in this step."""
        chunks = range(self.num_decode_seqs, len(self.seqs))
        return [*range(self.num_decode_seqs), *filter(self.samples, chunks)]

    def sampling_seqs(self) -> list[Sequence]:
        """The sequences at `sampling_indices`."""
        samples = self.sampling_indices()
        return self.seqs if len(samples) == len(self.seqs) else [self.seqs[i] for i in samples]

    def samples(self, index: int) -> bool:
        """Whether the sequence at `index` has all its tokens computed after this step and gets a new one."""
        return self.starts[index] + self.num_scheduled_tokens[index] == self.seqs[index].num_tokens
