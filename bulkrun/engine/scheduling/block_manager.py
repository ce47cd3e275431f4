"""KV cache blocks as numbers: who owns which, which are free, and which prefix each full one holds.

Knows nothing of tensors, sequences or scheduling. A block is free (nobody owns it) or owned by one or
more sequences (its reference count). A free block keeps its content and its hash until it is handed out again, so
the free list is at once the eviction order of the prefix cache: least recently used first, blocks without a hash
before all others.

Full blocks are shared. The last, partial block of a prompt (its tail) cannot be: whoever has it goes on writing. It
is remembered under a hash of its own, so that another sequence with that prompt copies it, or takes it over when it
is free.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain

from bulkrun.blocks import NULL_BLOCK

DIGEST_BYTES = 16
ROOT_HASH = b"\0" * DIGEST_BYTES


def hash_block(parent: bytes, token_ids: array[int]) -> bytes:
    """The digest of a block, full or not: of its tokens and, through `parent`, of everything before it."""
    return hashlib.blake2b(token_ids.tobytes(), digest_size=DIGEST_BYTES, key=parent).digest()


class BlockManager:
    """Hands out `num_blocks - 1` blocks (block `NULL_BLOCK` is never handed out) and finds cached prefixes."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks >= 2, "one block is reserved, so there must be at least two"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        self._tail_hashes: list[bytes | None] = [None] * num_blocks
        self._tails: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(b for b in range(num_blocks) if b != NULL_BLOCK)

    @property
    def num_free_blocks(self) -> int:
        """Blocks nobody owns, those of the prefix cache included."""
        return len(self._free)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that some sequence owns."""
        return self.num_blocks - 1 - len(self._free)

    def ref_count(self, block_id: int) -> int:
        """How many sequences own the block."""
        return self._ref_counts[block_id]

    def num_freed_by(self, block_tables: Iterable[Sequence[int]]) -> int:
        """How many blocks would be free without the owners that have these block tables."""
        owned = Counter(chain.from_iterable(block_tables))
        return sum(self._ref_counts[block_id] == times for block_id, times in owned.items())

    def match_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks that hold the longest cached prefix of this hash chain. Changes nothing."""
        matched: list[int] = []
        for block_hash in hashes:
            block_id = self._cached.get(block_hash)
            if block_id is None:
                break
            matched.append(block_id)
        return matched

    def num_blocks_of(self, num_tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def num_free_among(self, block_ids: Sequence[int]) -> int:
        """How many of these blocks nobody owns: what `acquire` would take from the free list."""
        return sum(1 for block_id in block_ids if not self._ref_counts[block_id])

    def acquire(self, block_ids: Sequence[int]) -> None:
        """Become one more owner of blocks that `match_prefix` found."""
        for block_id in block_ids:
            if not self._ref_counts[block_id]:
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def allocate(self, count: int) -> list[int]:
        """Take the `count` least recently used free blocks; what they cached is forgotten."""
        assert count <= len(self._free), f"{count} blocks wanted, {len(self._free)} are free: ask num_free_blocks"
        return [self._take_oldest() for _ in range(count)]

    def release(self, block_ids: Sequence[int]) -> None:
        """Give up one ownership of each block of a block table.

        The end of a prefix is worth less than its start, so of one table the last blocks are evicted first.
        """
        for block_id in reversed(block_ids):
            assert self._ref_counts[block_id] > 0, f"block {block_id} is released more often than it was taken"
            self._ref_counts[block_id] -= 1
            if not self._ref_counts[block_id]:
                self._free[block_id] = None
                if self._hashes[block_id] is None and self._tail_hashes[block_id] is None:
                    self._free.move_to_end(block_id, last=False)

    def register(self, block_id: int, block_hash: bytes) -> None:
        """Offer an owned, full block to later sequences with the same prefix. The first block of a hash stays."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} has no owner"
        if block_hash not in self._cached and self._hashes[block_id] is None:
            self._cached[block_hash] = block_id
            self._hashes[block_id] = block_hash

    def register_tail(self, block_id: int, tail_hash: bytes) -> None:
        """Offer an owned block that begins with the end of a prompt for copying. The first block of a hash stays."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} has no owner"
        if tail_hash not in self._tails and self._tail_hashes[block_id] is None:
            self._tails[tail_hash] = block_id
            self._tail_hashes[block_id] = tail_hash

    def match_tail(self, tail_hash: bytes) -> int | None:
        """The block that begins with this tail of a prompt, or None. Changes nothing."""
        return self._tails.get(tail_hash)

    def take_over_tail(self, block_id: int) -> None:
        """Become the owner of a free block for the tail it begins with; what stands behind that is forgotten."""
        assert not self._ref_counts[block_id], f"block {block_id} has an owner who writes to it: copy it"
        self._forget_full(block_id)
        self.acquire((block_id,))

    def forget(self, block_ids: Sequence[int]) -> None:
        """Withdraw blocks from the prefix cache (their content turned out to be unusable)."""
        for block_id in block_ids:
            self._forget_full(block_id)
            tail_hash = self._tail_hashes[block_id]
            if tail_hash is not None:
                del self._tails[tail_hash]
                self._tail_hashes[block_id] = None

    def _forget_full(self, block_id: int) -> None:
        block_hash = self._hashes[block_id]
        if block_hash is not None:
            del self._cached[block_hash]
            self._hashes[block_id] = None

    def _take_oldest(self) -> int:
        block_id, _ = self._free.popitem(last=False)
        self.forget((block_id,))
        self._ref_counts[block_id] = 1
        return block_id
