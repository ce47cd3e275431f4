"""The stream of generations a worker runs next: shards in plan order, claimed as they are needed.

A shard is opened only when the one before it has no more generations to give, so that at most one shard's prompts
are in memory, and other workers find the rest unclaimed. Knows shards and claims; knows no engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from bulkrun.job.plan.plan_view import PlanView
from bulkrun.job.store.claims import Claims
from bulkrun.job.work.shard_work import Generation, ShardWork

_LOOK_AGAIN_S = 0.5  # between two looks at the directory when there was nothing to claim


class Feed:
    """Generations across shard borders. `open_shard` reads a claimed shard and tells its owner that it is open."""

    def __init__(
        self,
        plan: PlanView,
        claims: Claims,
        open_shard: Callable[[int], ShardWork],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan, self._claims, self._open_shard, self._clock = plan, claims, open_shard, clock
        self._current: Iterator[Generation] = iter(())
        self._current_shard = -1
        self._opened: set[int] = set()
        self._next_look = clock()

    @property
    def shard(self) -> int:
        """The shard whose generations come next, -1 before the first."""
        return self._current_shard

    def leave(self, shard: int) -> None:
        """Never open this shard: the worker sees to it in another way (`tail`)."""
        self._opened.add(shard)

    def next(self) -> Generation | None:
        """The next generation, None while no shard can be claimed (ask again later)."""
        while True:
            committed_by_another = self._current_shard in self._plan.committed
            generation = None if committed_by_another else next(self._current, None)
            if generation is not None:
                return generation
            shard = self._claim_next()
            if shard is None:
                return None
            self._opened.add(shard)
            self._current_shard, self._current = shard, self._open_shard(shard).generations

    def _claim_next(self) -> int | None:
        if self._clock() < self._next_look:
            return None
        self._plan.refresh()
        for shard in self._plan.open_shards:
            if shard not in self._opened and self._claims.take(f"shard-{shard:05d}"):
                return shard
        self._next_look = self._clock() + _LOOK_AGAIN_S
        return None
