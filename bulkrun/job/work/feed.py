"""The stream of generations a worker runs next: shards in plan order, claimed as they are needed.

Whoever uses it claims a shard only when the one before it has no more generations to give, so that at most one shard's
prompts are in memory, and other workers find the rest unclaimed. Knows shards and claims; opens nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from bulkrun.job.plan.plan_view import PlanView
from bulkrun.job.store.claims import Claims
from bulkrun.job.store.workers import TTL_S
from bulkrun.job.work.shard_work import Generation, ShardWork

_LOOK_AGAIN_S = 0.5  # between two looks at the directory when there was nothing to claim
_LONGEST_WALK_S = TTL_S  # after which shards that were passed by may have lost their owner


class Feed:
    """Generations across shard borders: `next` until there is none, `claim` a shard, open it and `give` its work."""

    def __init__(self, plan: PlanView, claims: Claims, clock: Callable[[], float] = time.monotonic) -> None:
        self._plan, self._claims, self._clock = plan, claims, clock
        self._current: Iterator[Generation] = iter(())
        self._current_shard = -1
        self._left: set[int] = set()  # shards that are not to be claimed (again)
        self._ahead: Iterator[int] = iter(())  # open at the last look, not passed yet
        self._next_look = self._walk_ends = clock()

    @property
    def shard(self) -> int:
        """The shard whose generations come next, -1 before the first."""
        return self._current_shard

    def leave(self, shard: int) -> None:
        """Never claim this shard: the worker sees to it in another way (`tail`)."""
        self._left.add(shard)

    def next(self) -> Generation | None:
        """The next generation of the shard that was given last, None when it has no more to give."""
        committed_by_another = self._current_shard in self._plan.committed
        return None if committed_by_another else next(self._current, None)

    def give(self, work: ShardWork) -> None:
        """The generations of this shard come next."""
        self._current_shard, self._current = work.shard, work.generations

    def claim(self) -> int | None:
        """The next shard, now this worker's; None while there is none to claim (ask again later).

        A look at the directory is good for many: there may be as many shards as rows, and each look reads them all.
        """
        now = self._clock()
        if now < self._next_look:
            return None
        shard = self._take_next() if now < self._walk_ends else None
        if shard is None:
            self._plan.refresh()
            self._ahead, self._walk_ends = iter(self._plan.open_shards), now + _LONGEST_WALK_S
            shard = self._take_next()
        if shard is None:
            self._next_look = now + _LOOK_AGAIN_S
        return shard

    def _take_next(self) -> int | None:
        for shard in self._claims.free_shards(shard for shard in self._ahead if shard not in self._left):
            # Another worker may have committed it since the look; its claim went with that.
            if not self._plan.sees_committed(shard) and self._claims.take_shard(shard):
                self._left.add(shard)
                return shard
        return None
