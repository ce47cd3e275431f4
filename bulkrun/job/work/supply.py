"""What a worker runs next: generations of the shards that it claims and opens, at the end those of others' shards.

Opening a shard begins its journal and its progress. What was in the engine of a process that died is set aside, to run
alone. Knows no engine's steps and no end of the run.
"""

from __future__ import annotations

import time
from functools import partial

from bulkrun.job.store.claims import Claims
from bulkrun.job.store.workers import LifeWatch
from bulkrun.job.work.adapter_order import in_own_order
from bulkrun.job.work.attempt import Attempt
from bulkrun.job.work.engine_runner import engine_error
from bulkrun.job.work.feed import Feed
from bulkrun.job.work.flight import Key, key_of
from bulkrun.job.work.pipeline import Pipeline
from bulkrun.job.work.shard_work import Generation, ShardWork, open_shard
from bulkrun.job.work.suspicion import SetAside, set_aside, suspicion
from bulkrun.job.work.tail import Tail

_HELP_EVERY_S = 1.0


class Supply:
    """One worker's supply. Those whom a death convicts never run: their errors are recorded at once."""

    def __init__(self, attempt: Attempt, pipeline: Pipeline, life: LifeWatch) -> None:
        self._run, self._spec, self._log, self._life = attempt.run, attempt.spec, attempt.log, life
        self._pipeline, self._plan, self._engine = pipeline, pipeline.plan, pipeline.engine
        self._recorder, self._progress = pipeline.recorder, pipeline.progress
        in_order = partial(in_own_order, worker=attempt.worker.id)
        self._feed = Feed(pipeline.plan, Claims(attempt.run, attempt.worker, life), in_order=in_order)
        self._tail = Tail(attempt.run, attempt.worker.id, life, self._read_shard)
        self._elsewhere: set[Key] = set()  # generations of this worker's shards that others have taken
        self._next_help = 0.0

    def next(self, places: int) -> list[Generation]:
        """Generations to run now, so many that their texts fill the places; none while there are none, or before
        suspects that run first."""
        generations = self._take(places)
        if not generations and places > self._engine.max_num_seqs:
            generations = self._help(places)
        return generations

    def note_taken(self) -> None:
        """See which generations of the shard at hand others have taken: they are left to them."""
        self._elsewhere |= self._tail.elsewhere(self._feed.shard)

    def _take(self, places: int) -> list[Generation]:
        """The next generations of this worker's shards; none after one with suspects was opened, which run first."""
        taken: list[Generation] = []
        while places > 0 and not self._engine.isolation.active:
            if (generation := self._feed.next()) is None:
                if (shard := self._claim(taken)) is None:
                    break
                self._open_shard(shard)
            elif key_of(generation) not in self._elsewhere and self._fits(generation):
                taken.append(generation)
                places -= generation.num_texts
        return taken

    def _claim(self, taken: list[Generation]) -> int | None:
        """A shard for the model at hand; for another one only where nothing is left to run on this one."""
        adapter = taken[0].adapter if taken else self._engine.adapter
        return self._feed.claim(adapter, or_others=not (taken or self._engine.in_flight))

    def _is_of_this_model(self, shard: int) -> bool:
        return self._plan.shards[shard].adapter == self._engine.adapter

    def _help(self, places: int) -> list[Generation]:
        """Nothing is left to claim: what others will not get to for a while, about once a second."""
        now = time.monotonic()
        if now < self._next_help or self._engine.isolation.undecided or not self._recorder.idle:
            return []
        self._next_help = now + _HELP_EVERY_S
        running = set(map(key_of, self._engine.in_flight.values()))
        # a shard that it has begun may want another model again: what others took of it, and did not finish
        shards = [shard for shard in self._plan.open_shards if not running or self._is_of_this_model(shard)]
        found = self._tail.look(shards, running, places, may_help=self._is_of_this_model)
        if found is None:
            return []
        if found.whole:
            self._recorder.commit(found.shard)
            return []
        self._feed.leave(found.shard)
        self._recorder.help(found.shard, found.refused)
        self._progress.helps(found.shard)
        if found.aside is not None:
            self._reclaim_from_dead(found.shard, found.aside)
        return [generation for generation in found.generations if self._fits(generation)]

    def _fits(self, generation: Generation) -> bool:
        """Whether it can finish before this worker's end; if not, the next start finds it as it is."""
        left = generation.steps_left(self._progress.mean_output, self._engine.max_num_seqs)
        return self._pipeline.deadline.fits(left, loads=generation.adapter != self._engine.adapter)

    def _read_shard(self, shard: int) -> ShardWork:
        return open_shard(self._run, shard, self._spec.sampled, self._spec.run.row_timeout)

    def _open_shard(self, shard: int) -> None:
        work = self._read_shard(shard)
        rows = self._plan.shards[shard].rows * self._spec.sampling.generations
        self._progress.opened(shard, already_done=rows - work.outstanding, refused=len(work.refused))
        for journal, lines in work.damaged.items():
            self._log("journal_damaged", journal=journal, lines=len(lines))
        self._recorder.open(work)
        aside = set_aside(work, suspicion(self._run, shard, self._life))
        self._reclaim_from_dead(shard, aside)
        self._feed.give(aside.work)

    def _reclaim_from_dead(self, shard: int, aside: SetAside) -> None:
        """Run what was in the engine of a dead process alone, or not at all if it is known to be the cause."""
        self._engine.isolation.suspect(aside.groups)
        answers = [engine_error(generation, "died", how) for generation, how in aside.convicted]
        if answers:
            self._log("rows_convicted", shard=shard, rows=len(answers))
            self._pipeline.record(answers)
