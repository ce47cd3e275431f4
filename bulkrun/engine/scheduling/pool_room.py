"""Whether the block pool has room for one more sequence: for the tokens it has, and as everybody grows to their ends.

Joins what is known (free blocks) with what is guessed (`admission`). Takes no block and knows no queues.
"""

from __future__ import annotations

from collections.abc import Iterable

from bulkrun.engine.scheduling.admission import Growth, Growths, OutputLengthEstimator
from bulkrun.engine.scheduling.block_manager import BlockManager
from bulkrun.engine.scheduling.sequence import Sequence


class PoolRoom:
    """The room in one block manager's pool; `lengths` guesses how far sequences grow."""

    def __init__(self, block_manager: BlockManager, lengths: OutputLengthEstimator) -> None:
        self._manager = block_manager
        self._lengths = lengths

    def growths(self, running: Iterable[Sequence]) -> Growths:
        """What those who run hold and will hold."""
        return Growths(map(self.growth, running), self._manager.block_size)

    def growth(self, seq: Sequence, num_shared_tokens: int | None = None) -> Growth:
        """What one sequence does; `num_shared_tokens`: those of a sequence that does not run yet."""
        num_shared = seq.num_shared_tokens if num_shared_tokens is None else num_shared_tokens
        return Growth(seq.num_tokens - num_shared, self._lengths.remaining_tokens(seq))

    def fits(self, seq: Sequence, cached_blocks: list[int], growths: Growths) -> bool:
        """Whether its blocks are free now and, as far as can be guessed, everyone's later ones as well.

        `growths` are those of who runs, `cached_blocks` what the prefix cache has of the sequence.
        """
        if self._num_needed(seq, cached_blocks) > self._manager.num_free_blocks:
            return False
        return self._can_grow(seq, cached_blocks, growths, self._manager.num_used_blocks)

    def may_fit_without(
        self, leaving: list[Sequence], seq: Sequence, cached_blocks: list[int], running: list[Sequence]
    ) -> bool:
        """Whether it may fit if these left; False where it surely would not: with what stays it is too much.

        Exact only once they have left: those of its cached blocks that they alone hold become free, and are taken then.
        """
        left = set(map(id, leaving))
        staying = [one for one in running if id(one) not in left]
        # Asked in every step while it waits: a few leave, and what stays may hold a million blocks.
        num_freed = self._manager.num_freed_by(one.block_table for one in leaving)
        if self._num_needed(seq, cached_blocks) > self._manager.num_free_blocks + num_freed:
            return False
        num_used = self._manager.num_used_blocks - num_freed
        return self._can_grow(seq, cached_blocks, self.growths(staying), num_used)

    def _can_grow(self, seq: Sequence, cached_blocks: list[int], growths: Growths, num_used_blocks: int) -> bool:
        """Whether it and those who hold the used blocks can all grow to their guessed ends; alone it always can."""
        if not len(growths):
            return True
        growth = self.growth(seq, len(cached_blocks) * self._manager.block_size)
        return growths.fit_with(growth, self._manager.num_blocks - 1, num_used_blocks)  # one is the null block

    def _num_needed(self, seq: Sequence, cached_blocks: list[int]) -> int:
        """Free blocks that it takes at its admission; cached ones that nobody holds are free too."""
        missing = self._manager.num_blocks_of(seq.num_tokens) - len(cached_blocks)
        return missing + self._manager.num_free_among(cached_blocks)
