"""The tail of a run: a worker with nothing left to claim helps with the shards that others are still working on.

It takes generations that are neither journaled nor in anybody's engine, from the end of the shard's run order, while
the shard's owner goes on from the front and leaves out what is in other engines (their `flight` records say what that
is). All of that is advice: a generation that two workers run costs time and nothing else, and the part is published
once. Whoever finds every outcome of such a shard on disk commits it. Knows no engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from bulkrun.job.store.journal import JournalRecord
from bulkrun.job.store.journal_files import attempts_by_shard
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.workers import LifeWatch
from bulkrun.job.work.flight import Key, key_of, read_flight
from bulkrun.job.work.shard_work import Generation, ShardWork
from bulkrun.job.work.suspicion import SetAside, set_aside, suspicion


@dataclass(frozen=True)
class Help:
    """What a look at a shard found: that it is whole, or generations to run with others and suspects to run alone."""

    shard: int
    whole: bool = False
    generations: list[Generation] = field(default_factory=list)
    aside: SetAside | None = None
    refused: list[JournalRecord] = field(default_factory=list)

    @property
    def found_something(self) -> bool:
        """Whether there is anything to do in the shard."""
        return self.whole or bool(self.generations or self.refused) or self.aside is not None


class Tail:
    """One worker's way to help. `open_shard` reads a shard and all that is journaled of it."""

    def __init__(self, run: RunDir, worker: str, life: LifeWatch, open_shard: Callable[[int], ShardWork]) -> None:
        self._run, self._worker, self._life, self._open_shard = run, worker, life, open_shard
        self._turn = 0

    def elsewhere(self, shard: int) -> set[Key]:
        """The generations of this shard that other living workers have, or recently had, in their engines."""
        return self._in_engines(shard, self._others(shard))

    def _in_engines(self, shard: int, workers: Sequence[str]) -> set[Key]:
        flights = [read_flight(self._run.flight_file(worker)) for worker in workers]
        return {key for flight in flights for key in flight.left if key[0] == shard}

    def look(
        self, shards: Sequence[int], mine: Collection[Key], places: int, may_help: Callable[[int], bool]
    ) -> Help | None:
        """Find something to do in the shards that this worker has begun, else in one of another, each in its turn.

        `mine` is in this worker's engine; what is taken fills `places` with its texts. `may_help`: whether in a shard
        of another.
        """
        attempts = attempts_by_shard(self._run)
        living = set(self._living(set[str]().union(*attempts.values())))
        own = [shard for shard in shards if self._worker in attempts.get(shard, ())]
        mine_too = set(own)
        others = [
            shard
            for shard in shards
            if shard not in mine_too and living & attempts.get(shard, set()) and may_help(shard)
        ]
        self._turn += 1
        turn = self._turn % max(1, len(others))
        for shard in [*own, *others[turn : turn + 1]]:
            found = self._look_at(shard, mine, places)
            if found.found_something:
                return found
        return None

    def _look_at(self, shard: int, mine: Collection[Key], places: int) -> Help:
        others = self._others(shard)
        # before the journals: what ends meanwhile is in one of them
        taken = self._in_engines(shard, others).union(mine)
        work = self._open_shard(shard)
        if self._run.part(shard).exists():  # and the journals went with that: the plan's view is a second old
            return Help(shard)
        if work.outstanding == 0:
            return Help(shard, whole=True)
        aside = set_aside(work, suspicion(self._run, shard, self._life))
        waiting = (generation for generation in aside.work.generations if key_of(generation) not in taken)
        last = _last(waiting, places)
        # One of those who work on the shard sees to the suspects; all of them can tell who that is.
        suspects = bool(aside.groups or aside.convicted) and self._worker <= min(others, default=self._worker)
        refused = [] if others else work.refused  # the worker that opened it died before it journaled them
        return Help(shard, generations=last, aside=aside if suspects else None, refused=refused)

    def _others(self, shard: int) -> list[str]:
        return self._living(self._run.attempts_at(shard))

    def _living(self, attempts: set[str]) -> list[str]:
        return sorted(worker for worker in attempts - {self._worker} if self._life.lives(worker))


def _last(generations: Iterable[Generation], places: int) -> list[Generation]:
    """The last ones, as many as fill the places."""
    last = deque[Generation]()
    for generation in generations:
        last.append(generation)
        places -= generation.num_texts
        while places + last[0].num_texts <= 0:
            places += last.popleft().num_texts
    return list(last)
