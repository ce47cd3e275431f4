"""The stream of generations a worker runs next: shards in plan order, claimed as they are needed.

Whoever uses it claims a shard only when the one before it has no more generations to give, so that at most one shard's
prompts are in memory, and other workers find the rest unclaimed. Shards of one adapter come before those of the next.
Knows shards and claims; opens nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from bulkrun.job.plan.plan_view import PlanView
from bulkrun.job.store.claims import Claims
from bulkrun.job.store.workers import TTL_S
from bulkrun.job.work.shard_work import Generation, ShardWork

_LOOK_AGAIN_S = 0.5  # between two looks at the directory when there was nothing to claim
_LONGEST_WALK_S = TTL_S  # after which shards that were passed by may have lost their owner


class Feed:
    """Generations across shard borders: `next` until there is none, `claim` a shard, open it and `give` its work.

    `in_order` says which adapters' shards come first.
    """

    def __init__(
        self,
        plan: PlanView,
        claims: Claims,
        clock: Callable[[], float] = time.monotonic,
        in_order: Callable[[Iterable[str]], list[str]] = sorted,
    ) -> None:
        self._plan, self._claims, self._clock, self._in_order = plan, claims, clock, in_order
        self._current: Iterator[Generation] = iter(())
        self._current_shard = -1
        self._left: set[int] = set()  # shards that are not to be claimed (again)
        self._ahead: dict[str, Iterator[int]] = {}  # open at the last look, not passed yet, by their adapters
        self._next_look = self._walk_ends = clock()
        self._was_narrow = False  # the last claim in vain, which left other adapters' shards ahead

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

    def claim(self, adapter: str = "", *, or_others: bool = False) -> int | None:
        """The next shard of this adapter, now this worker's; None while there is none to claim (ask again later).

        `or_others`: where there is none, one of another adapter. A look at the directory is good for many: there may be
        as many shards as rows, and each look reads them all.
        """
        now = self._clock()
        if now < self._next_look and not (or_others and self._was_narrow):
            return None
        shard = self._take_next(adapter, or_others) if now < self._walk_ends else None
        if shard is None:
            self._look(now)
            shard = self._take_next(adapter, or_others)
        if shard is None:
            self._next_look, self._was_narrow = now + _LOOK_AGAIN_S, not or_others
        return shard

    def _look(self, now: float) -> None:
        self._plan.refresh()
        shards: dict[str, list[int]] = {}
        for shard in self._plan.open_shards:
            shards.setdefault(self._plan.shards[shard].adapter, []).append(shard)
        self._ahead = {adapter: iter(of_it) for adapter, of_it in shards.items()}
        self._walk_ends = now + _LONGEST_WALK_S

    def _take_next(self, adapter: str, or_others: bool) -> int | None:
        adapters = [adapter, *(self._in_order(self._ahead.keys() - {adapter}) if or_others else ())]
        ahead = chain.from_iterable(self._ahead.get(name, ()) for name in adapters)
        for shard in self._claims.free_shards(shard for shard in ahead if shard not in self._left):
            # Another worker may have committed it since the look; its claim went with that.
            if not self._plan.sees_committed(shard) and self._claims.take_shard(shard):
                self._left.add(shard)
                return shard
        return None
