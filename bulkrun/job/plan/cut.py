"""Cutting an ordered window into shards of about equal estimated cost.

A shard ends where its cost, rows or bytes would go over the target, and then at the last border between different
prompts, so that identical prompts stay together wherever they fit into one shard. A partition's end always is a border.
Knows only numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bulkrun.job.plan.index import I64
from bulkrun.job.plan.order import RunOrder

SHARDS_PER_WINDOW = 16  # at least, where rows suffice: work for several workers, and early first results
MIN_SHARD_ROWS = 64
MAX_SHARD_ROWS = 4096
MAX_SHARD_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Limits:
    """What a shard may hold: `rows` and `nbytes` at most; `shards` is how many the cost is divided by."""

    rows: int
    nbytes: int
    shards: int

    @classmethod
    def of(cls, total_rows: int, window_rows: int, shard_rows: int | None, generations: int = 1) -> Limits:
        """The limits for a window of `window_rows` rows out of `total_rows` known of; `shard_rows` is the job's own.

        A worker holds every outcome of a shard when it commits it: of rows with many `generations` there are fewer.
        """
        if shard_rows is not None:
            return cls(shard_rows, MAX_SHARD_BYTES, -(-window_rows // shard_rows))
        most = max(1, MAX_SHARD_ROWS // generations)
        wanted = min(max(total_rows // SHARDS_PER_WINDOW, MIN_SHARD_ROWS), most)
        return cls(most, MAX_SHARD_BYTES, -(-window_rows // wanted))


def cut(order: RunOrder, costs: I64, nbytes: I64, limits: Limits) -> I64:
    """The borders of the shards in the order: shard k is ``order.rows[borders[k]:borders[k + 1]]``.

    `costs` and `nbytes` are per row of the window, in input order. A row that is too large alone is a shard.
    """
    rows = len(order.rows)
    if not rows:
        return np.zeros(1, np.int64)
    # Only the first row of an identity is computed; the others only cost writing.
    cost_until = np.cumsum(np.where(order.first, costs[order.rows], 0))
    bytes_until = np.cumsum(nbytes[order.rows])
    fresh = np.append(np.flatnonzero(order.first), rows)  # where a shard may begin without parting identical prompts
    target = max(1, -(-int(cost_until[-1]) // limits.shards))
    borders = [0]
    while (start := borders[-1]) < rows:
        cost, size = (int(until[start - 1]) if start else 0 for until in (cost_until, bytes_until))
        partition_end = int(order.ends[np.searchsorted(order.ends, start, "right")])
        left = int(cost_until[partition_end - 1]) - cost
        end = min(
            start + limits.rows,
            # The first prompt is taken whatever it costs, and so are its copies, which cost nothing.
            int(np.searchsorted(cost_until, max(cost + _wanted(target, left), int(cost_until[start])), "right")),
            int(np.searchsorted(bytes_until, size + limits.nbytes, "right")),
            partition_end,
        )
        border = int(fresh[np.searchsorted(fresh, end, "right") - 1])
        borders.append(border if border > start else max(end, start + 1))
    return np.array(borders, np.int64)


def _wanted(target: int, left: int) -> int:
    """The cost of the next shard: a small rest of what is `left` comes along, so that no file holds a row or two."""
    return left if left <= target * 5 // 4 else target
