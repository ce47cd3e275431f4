"""The order in which a window's rows run: shared prefixes together, long work first, short work last.

A depth-first walk over the tree of prefixes, done as sorts: at each depth clusters come by their mean cost, the largest
first, and inside the deepest cluster rows do too. So a prefix is hot while its rows run, and the last rows are short,
which keeps the tail of the run short. Where no prefixes are indexed, as of texts to embed, rows come by length alone.
Rows with a better priority come before all that, error rows last. With partitions (folders of the output, adapters)
the partition is the outermost cluster: a shard is one file in one folder, of one adapter. Knows hashes and lengths, no
tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bulkrun.job.plan.index import BLOCK_TOKENS, I64, U64, WindowIndex


class RunOrder(NamedTuple):
    """`rows`: the window's rows in the order to run them. `first`: whether the row at that place in the order is the
    first of its identity in its partition (one generation answers the others that follow it at once). `ends`: where
    each partition ends in the order."""

    rows: I64
    first: np.ndarray[tuple[int], np.dtype[np.bool_]]
    ends: I64


def run_order(index: WindowIndex, partitions: I64 | None = None, priorities: I64 | None = None) -> RunOrder:
    """The order of a window, the same for the same rows however they came. `partitions`: a number per row;
    `priorities`: smaller ones first, within a partition."""
    if not len(index):
        return RunOrder(np.empty(0, np.int64), np.empty(0, np.bool_), np.zeros(1, np.int64))
    costs = index.costs
    partition = np.zeros(len(index), np.uint64) if partitions is None else partitions.astype(np.uint64)
    keys = [_cluster_rank(index.prefixes[:, level], costs) for level in range(index.prefixes.shape[1])]
    rows_in_order = np.arange(len(index))
    # lexsort takes the most important key last.
    tie_break = (rows_in_order, index.identity[:, 1], index.identity[:, 0], -costs)
    priority = np.zeros(len(index), np.int64) if priorities is None else priorities
    rows = np.lexsort((*tie_break, *reversed(keys), priority, index.lengths == 0, _cluster_rank(partition, costs)))
    ordered = index.identity[rows]
    begins = np.diff(partition[rows], prepend=partition[rows[0]]) != 0  # a new partition
    first = np.ones(len(rows), np.bool_)
    first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1) | begins[1:]
    return RunOrder(rows, first, np.append(np.flatnonzero(begins), len(rows)))


def in_shards(index: WindowIndex, order: RunOrder, borders: I64) -> RunOrder:
    """The order with `first` as shards have it: what shares a shard is answered at once wherever it stands in it, as
    with other priorities, and what the borders part is not."""
    ordered = index.identity[order.rows]
    shard = np.searchsorted(borders, np.arange(len(ordered)), "right")
    places = np.lexsort((ordered[:, 1], ordered[:, 0], shard))  # stable: of equal ones the first comes first
    same = (ordered[places[1:]] == ordered[places[:-1]]).all(axis=1) & (np.diff(shard[places]) == 0)
    first = np.ones(len(ordered), np.bool_)
    first[places[1:][same]] = False
    return order._replace(first=first)


def shared_prefix_tokens(index: WindowIndex, order: RunOrder) -> int:
    """Tokens of unique prompts that need not be computed when every shared prefix is computed once.

    Counted at the depths that are indexed, so it is a lower bound.
    """
    unique = order.rows[order.first]
    lengths, saved, above = index.lengths[unique], 0, 0
    for level in range(index.prefixes.shape[1]):
        depth = BLOCK_TOKENS << level
        hashes = index.prefixes[unique[lengths >= depth], level]
        saved += (len(hashes) - len(np.unique(hashes))) * (depth - above)
        above = depth
    return saved


def _cluster_rank(hashes: U64, costs: I64) -> I64:
    """For each row the rank of its cluster: the costliest mean first, ties by hash."""
    clusters, member_of, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    means = np.bincount(member_of, weights=costs, minlength=len(clusters)) / counts
    ranks = np.empty(len(clusters), np.int64)
    ranks[np.lexsort((clusters, -means))] = np.arange(len(clusters))
    return ranks[member_of]
