"""What sequences share of their beginnings: full blocks by their hash chain, and the end of a prompt in its last block.

Knows which blocks hold which tokens, through the block manager. Knows no queues and no budgets.
"""

from __future__ import annotations

from typing import NamedTuple

from bulkrun.engine.scheduling.block_manager import BlockManager
from bulkrun.engine.scheduling.sequence import Sequence
from bulkrun.engine.scheduling.state_cache import StateCache


class CachedPrefix(NamedTuple):
    """What the prefix cache holds of a sequence: full blocks, and perhaps the block that begins with its tail."""

    blocks: list[int]
    tail_block: int | None = None
    state_row: int | None = None  # where the state behind the blocks is, of a model that keeps one
    num_known: int = 0  # of such a model: blocks that there are, be there a state or not


class PrefixCache:
    """Finds and offers the blocks of one block manager; where it is not enabled, there is nothing to find."""

    def __init__(self, block_manager: BlockManager, *, is_enabled: bool, states: StateCache | None = None) -> None:
        """`states`: those of a model whose sequences have some, without which blocks are of no use to others."""
        self._manager = block_manager
        self._is_enabled = is_enabled
        self._states = states

    def find(self, seq: Sequence) -> CachedPrefix:
        """The cached part of its tokens, never including the last one, whose logits are wanted."""
        if not self._is_enabled or not seq.reads_prefix:
            return CachedPrefix([])
        manager, size = self._manager, self._manager.block_size
        hashes = seq.hash_full_blocks((seq.num_tokens - 1) // size, size)
        blocks = manager.match_prefix(hashes)
        if self._states is not None:
            num_blocks, row = self._states.find(hashes[: len(blocks)])
            return CachedPrefix(blocks[:num_blocks], state_row=row, num_known=len(blocks))
        tail = seq.prompt_tail(size)
        if tail.num_tokens and len(blocks) == tail.block_index:
            return CachedPrefix(blocks, manager.match_tail(tail.hash))
        return CachedPrefix(blocks)

    def is_worth_a_wait(self, seq: Sequence) -> bool:
        """Whether a state that the sequence could begin with is on its way."""
        if self._states is None or not (self._is_enabled and seq.reads_prefix):
            return False
        size = self._manager.block_size
        hashes = seq.hash_full_blocks((seq.num_tokens - 1) // size, size)
        num_blocks, _ = self._states.find(hashes)
        return self._states.is_coming(hashes[num_blocks:])

    def offer(self, seq: Sequence) -> None:
        """Let others share what is scheduled and known of a sequence.

        Within a step every layer writes the KV of all tokens before any of them attends, so a sequence of the same
        step can already share them: a prefix is shared while it is being computed.
        """
        if not self._is_enabled or not seq.shares_prefix:
            return
        first, size = seq.num_registered_blocks, self._manager.block_size
        end = min(seq.num_computed_tokens, len(seq.token_ids)) // size
        if end > first:
            self._offer_blocks(seq, first, end)
        if self._states is None and not seq.has_offered_tail and seq.num_computed_tokens >= seq.num_prompt_tokens - 1:
            self._offer_tail(seq)

    def _offer_blocks(self, seq: Sequence, first: int, end: int) -> None:
        hashes = seq.hash_full_blocks(end, self._manager.block_size)
        for index in range(first, end):
            self._manager.register(seq.block_table[index], hashes[index])
        seq.num_registered_blocks = end

    def _offer_tail(self, seq: Sequence) -> None:
        """Offer the end of the prompt to others with the same prompt; of a copy, the source stays on offer."""
        tail = seq.prompt_tail(self._manager.block_size)
        if tail.num_tokens:
            self._manager.register_tail(seq.block_table[tail.block_index], tail.hash)
        seq.has_offered_tail = True
