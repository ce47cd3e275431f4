"""What follows from the flights of the dead: whose rows are suspect, which are convicted, and setting both aside.

One witnessed death makes suspects of what was left; they run again in ever smaller groups (`isolation`). A generation
that was alone in the engine at two witnessed deaths is convicted. A death that nobody saw may have been a power cut or
kill -9 of everything: it convicts nobody, and makes suspects only of what was in two such flights. Reads; runs nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import chain

from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.workers import LifeWatch
from bulkrun.job.work.flight import Key, key_of, read_flight
from bulkrun.job.work.isolation import split
from bulkrun.job.work.shard_work import Generation, ShardWork

_ALONE_DEATHS = 2
_UNSEEN_DEATHS = 2


@dataclass(frozen=True)
class Suspicion:
    """What dead workers say about a shard: keys that go free again when they finish, and keys that never will.

    `group_of` gives each suspect the number of generations that were left in the smallest flight it died in;
    `convicted` gives the way it dies.
    """

    group_of: dict[Key, int] = field(default_factory=dict)
    convicted: dict[Key, str] = field(default_factory=dict)


def suspicion(run: RunDir, shard: int, life: LifeWatch) -> Suspicion:
    """Read the flights of the dead that had the shard open. `life` tells which workers still live.

    Others need not be read: a worker's journal of a shard is there before the first of its rows enters the engine, and
    goes only when the shard is committed.
    """
    found, alone, unseen = Suspicion(), Counter[Key](), Counter[Key]()
    for worker in sorted(run.attempts_at(shard)):
        if life.lives(worker):  # of many workers most do, and a flight is much longer than a heartbeat
            continue
        flight = read_flight(run.flight_file(worker))
        num_left = len(flight.left)
        here = {key for key in flight.left if key[0] == shard}
        unseen.update(here if flight.died is None else ())
        alone.update(here if flight.died is not None and num_left == 1 else ())
        for key in here:
            if flight.died is not None or unseen[key] >= _UNSEEN_DEATHS:
                found.group_of[key] = min(found.group_of.get(key, num_left), num_left)
            if flight.died is not None and num_left == 1 and alone[key] >= _ALONE_DEATHS:
                found.convicted[key] = flight.died
    return found


@dataclass(frozen=True)
class SetAside:
    """A shard's work without what must not run with others: groups to run alone, the least suspect first."""

    work: ShardWork
    groups: list[list[Generation]]
    convicted: list[tuple[Generation, str]]


def set_aside(work: ShardWork, suspicion: Suspicion) -> SetAside:
    """Take the suspects out of a shard's work. What comes before the last of them in run order is kept in memory."""
    missing = set(suspicion.group_of)
    kept: list[Generation] = []
    aside: dict[int, list[Generation]] = {}
    convicted = []
    for generation in work.generations if missing else ():
        key = key_of(generation)
        if key in suspicion.convicted:
            convicted.append((generation, suspicion.convicted[key]))
        elif key in suspicion.group_of:
            aside.setdefault(suspicion.group_of[key], []).append(generation)
        else:
            kept.append(generation)
        missing.discard(key)
        if not missing:
            break
    groups = [group for left in sorted(aside, reverse=True) for group in split(aside[left], left)]
    return SetAside(replace(work, generations=chain(kept, work.generations)), groups, convicted)
