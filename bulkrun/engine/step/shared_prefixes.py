"""Which decode sequences of a step begin with the same blocks, so that attention reads those once for all of them.

The prefix cache gives equal prefixes the same physical blocks, and a block stands for everything before it. So two
sequences with the same block at a place share all tokens up to there, and nothing has to be compared but block ids.
Groups are sought again only when the sequences in decode change. Knows block tables; knows no tokens and no kernels.

When it pays: a group's prefix is read once for a tile of sequences, in which a tile's program takes about as long as
one sequence's would (memory, not arithmetic). That saves (sequences - tiles) x prefix reads, for one more kernel per
layer: some microseconds, in which a GPU reads a few thousand tokens of a layer.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from bulkrun.engine.scheduling.scheduled_batch import ScheduledBatch
from bulkrun.engine.scheduling.sequence import Sequence
from bulkrun.engine.step.staging import HostStaging
from bulkrun.ops.attention.metadata import PREFIX_UNIT, SharedPrefixes

MIN_GROUP_SIZE = 4
MIN_PREFIX_LEN = 256  # tokens
MIN_SAVED_TOKENS = 8192  # over all groups of a step
MAX_GROUPS = 64
_ROOT = -1  # the parent of groups that are part of no other


class PrefixGroup(NamedTuple):
    """Decode sequences that begin with the same blocks."""

    members: list[int]  # their indices in the step
    prefix_len: int  # tokens they share


def find_groups(tables: list[list[int]], block_size: int, seqs_per_tile: int) -> list[PrefixGroup]:
    """The groups of block tables that save most reads, the best first; none where it is not worth it.

    Prefixes form a tree, and a sequence can be in one group only: either a node's or that of one of its children.
    """
    tree, place = _PrefixTree(tables, block_size, seqs_per_tile), max(MIN_PREFIX_LEN // block_size, 1)
    groups = tree.best(place)
    groups.sort(key=tree.saved, reverse=True)
    groups = groups[:MAX_GROUPS]
    return groups if sum(map(tree.saved, groups)) >= MIN_SAVED_TOKENS else []


def saved_tokens(num_seqs: int, prefix_len: int, seqs_per_tile: int) -> int:
    """Reads of a token, in one layer, that a group saves."""
    return (num_seqs - -(-num_seqs // seqs_per_tile)) * prefix_len


@dataclass(frozen=True, slots=True)
class _PrefixTree:
    """The prefixes of a step's block tables. Places in a table are counted from 1."""

    tables: list[list[int]]
    block_size: int
    seqs_per_tile: int

    def saved(self, group: PrefixGroup) -> int:
        return saved_tokens(len(group.members), group.prefix_len, self.seqs_per_tile)

    def best(self, place: int) -> list[PrefixGroup]:
        """The groups that save most, of sequences with the same block at this place or further on.

        Without recursion: where every turn of a conversation is a row, the tree is as deep as there are sequences.
        """
        nodes = self._nodes(place)
        below: dict[int, list[PrefixGroup]] = defaultdict(list)  # parent -> the best that its children come to
        for number in reversed(range(len(nodes))):
            parent, together = nodes[number]
            apart = below.pop(number, [])
            is_best = self.saved(together) >= sum(map(self.saved, apart))
            below[parent] = ([together] if is_best else apart) + below[parent]
        return below[_ROOT]

    def _nodes(self, place: int) -> list[tuple[int, PrefixGroup]]:
        """Every group there can be, with the number of the one that it is a part of, which stands before it."""
        nodes: list[tuple[int, PrefixGroup]] = []
        unseen: list[tuple[int, Iterable[int], int]] = [(_ROOT, range(len(self.tables)), place)]
        while unseen:
            parent, members, place = unseen.pop()
            far_enough = [index for index in members if len(self.tables[index]) >= place]
            for alike in self._by_block(far_enough, place):
                num_shared = self._num_shared_blocks(alike, place)
                prefix_len = num_shared * self.block_size // PREFIX_UNIT * PREFIX_UNIT
                next_place = -(-(prefix_len + PREFIX_UNIT) // self.block_size)  # one unit more
                unseen.append((len(nodes), alike, next_place))
                nodes.append((parent, PrefixGroup(alike, prefix_len)))
        return nodes

    def _by_block(self, members: list[int], place: int) -> list[list[int]]:
        """Members with the same block at a place; groups that are too small are left out."""
        column = [self.tables[index][place - 1] for index in members]
        by_block: dict[int, list[int]] = {b: [] for b, size in Counter(column).items() if size >= MIN_GROUP_SIZE}
        if by_block:
            for block, index in zip(column, members, strict=True):
                if block in by_block:
                    by_block[block].append(index)
        return list(by_block.values())

    def _num_shared_blocks(self, members: list[int], low: int) -> int:
        """How many blocks all members share, at least `low`: where the last one is the same, all before it are."""
        some = [self.tables[index] for index in members]
        first, last, high = some[0], some[-1], min(map(len, some))
        while low < high:
            middle = (low + high + 1) // 2
            block = first[middle - 1]
            if last[middle - 1] == block and [table[middle - 1] for table in some].count(block) == len(some):
                low = middle
            else:
                high = middle - 1
        return low


class SharedPrefixTable:
    """The shared prefixes of the step at hand, in tensors that stay where they are: a CUDA graph can read them."""

    def __init__(self, max_num_seqs: int, block_size: int, seqs_per_tile: int, staging: HostStaging) -> None:
        self._max_num_seqs, self._block_size, self._seqs_per_tile = max_num_seqs, block_size, seqs_per_tile
        self._staging = staging
        self._members: list[Sequence] = []
        self.groups: list[PrefixGroup] = []
        self._sizes = (max_num_seqs, MAX_GROUPS + 1, MAX_GROUPS, max_num_seqs, 2)
        self._packed = staging.send_array(array("i", [0]) * sum(self._sizes), torch.int32).clone()

    def update(self, batch: ScheduledBatch) -> None:
        """Bring groups and tensors up to date with a step."""
        members = batch.seqs[: batch.num_decode_seqs]
        if members == self._members:
            return
        groups = find_groups([seq.block_table for seq in members], self._block_size, self._seqs_per_tile)
        if groups or self.groups:
            self._packed.copy_(self._staging.send_array(self._pack(groups), torch.int32))
        self._members, self.groups = members, groups

    def clear(self) -> None:
        """Nobody shares anything: what a run before capturing may read, whose step has other sequences or none."""
        self._packed.zero_()
        self._members, self.groups = [], []

    def view(self, num_decode_seqs: int) -> SharedPrefixes:
        """The tensors as a step of so many decode sequences, padding included, wants them."""
        seq_index, cu_groups, prefix_lens_G, prefix_lens_S, counts = self._packed.split(self._sizes)
        num_groups = min(MAX_GROUPS, max(num_decode_seqs // MIN_GROUP_SIZE, 1))
        return SharedPrefixes(
            seq_index[:num_decode_seqs],
            cu_groups[: num_groups + 1],
            prefix_lens_G[:num_groups],
            prefix_lens_S[:num_decode_seqs],
            counts,
        )

    def _pack(self, groups: list[PrefixGroup]) -> array[int]:
        """All tensors one after the other; groups that are not there have nobody."""
        sizes = [len(members) for members, _ in groups] + [0] * (MAX_GROUPS - len(groups))
        lens_S = [0] * self._max_num_seqs
        for members, prefix_len in groups:
            for index in members:
                lens_S[index] = prefix_len
        seq_index = [index for members, _ in groups for index in members]
        seq_index += [0] * (self._max_num_seqs - len(seq_index))
        lens_G = [prefix_len for _, prefix_len in groups] + [0] * (MAX_GROUPS - len(groups))
        counts = (len(groups), max(lens_G))
        return array("i", [*seq_index, *accumulate(sizes, initial=0), *lens_G, *lens_S, *counts])
