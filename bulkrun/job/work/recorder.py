"""The thread between the engine and the disk: decodes, journals, syncs and commits, off the engine's path.

The engine's thread hands over what finished and goes on; this one turns it into records in batches, appends them,
fsyncs every `checkpoint_every` seconds and commits a shard as soon as its last outcome is journaled. Its
first failure ends it and comes out of the next call of its owner.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bulkrun.data.results.parts import PartInfo
from bulkrun.job.outputs.output_text import Decode
from bulkrun.job.store.journal import JournalRecord, JournalWriter, PartialRecord
from bulkrun.job.store.open_journals import OpenJournals
from bulkrun.job.store.replaced import OwnRun
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.work.answers import Answer
from bulkrun.job.work.commit import RunIdentity, commit_shard
from bulkrun.job.work.shard_work import Generation, ShardWork
from bulkrun.job.work.vectors import reader_of

_QUEUE_STEPS = 32  # engine steps whose results may wait for the disk before the engine waits too


class Recorded(NamedTuple):
    """A generation's outcome that is journaled. `late`: that it failed was found when its output was read."""

    shard: int
    rows: int
    failed: bool
    late: bool


@dataclass(frozen=True)
class _Opened:
    """A shard of which this worker journals something."""

    shard: int
    journal: JournalWriter


@dataclass(frozen=True)
class _Outstanding:
    """A shard is whole when this worker has journaled so many outcomes; None: others journal some of them."""

    shard: int
    outcomes: int | None


@dataclass(frozen=True)
class _Records:
    """What is known without an answer: outcomes of rows that cannot run, outputs so far."""

    shard: int
    records: Sequence[JournalRecord | PartialRecord]


@dataclass(frozen=True)
class _Whole:
    """A shard whose every outcome was seen on disk."""

    shard: int


_Item = Answer | _Opened | _Outstanding | _Records | _Whole


class Recorder:
    """Owns the journals of one attempt. All public methods are for the engine's thread."""

    def __init__(
        self, run: RunDir, identity: RunIdentity, decode: Decode, attempt: str, *, checkpoint_every: float
    ) -> None:
        self._run, self._identity, self._own_run = run, identity, OwnRun(run, identity.run_id)
        self._reader = reader_of(decode, identity.results)
        self._attempt, self._checkpoint_every = attempt, checkpoint_every
        self._queue: queue.Queue[Sequence[_Item] | None] = queue.Queue(_QUEUE_STEPS)
        self._journals = OpenJournals(self._own_run.check)
        self._outstanding: dict[int, int] = {}
        self._whole: set[int] = set()
        self._unjournaled: deque[Generation] = deque()
        self._committed: queue.SimpleQueue[tuple[int, PartInfo]] = queue.SimpleQueue()
        self._recorded: queue.SimpleQueue[Recorded] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run_until_closed, name="recorder", daemon=True)

    def start(self) -> None:
        """Start the thread; `close` ends it."""
        self._thread.start()

    def open(self, work: ShardWork) -> None:
        """Begin a shard; its refused rows are journaled, and a shard with nothing left to run is committed.

        Raises RunError when another run took this one's place.
        """
        journal = JournalWriter(self._run.journal_file(work.shard, self._attempt))
        self._own_run.check()  # now that the file exists, it moves with its run
        whole_after = _Outstanding(work.shard, work.outstanding)
        self._put([_Opened(work.shard, journal), whole_after, _Records(work.shard, work.refused)])

    def help(self, shard: int, refused: list[JournalRecord]) -> None:
        """Journal what this worker does for a shard that others work on too; `commit` says when it is whole."""
        path = self._run.journal_file(shard, self._attempt)
        if not path.exists() and not self._run.part(shard).exists():
            self._put([_Opened(shard, JournalWriter(path))])
        self._put([_Outstanding(shard, None), _Records(shard, refused)])

    def commit(self, shard: int) -> None:
        """Commit a shard of which every outcome was seen on disk."""
        self._put([_Whole(shard)])

    @property
    def idle(self) -> bool:
        """Whether everything handed over is written and committed."""
        return self._queue.unfinished_tasks == 0

    def record(self, answers: list[Answer]) -> None:
        """Journal what ended. Blocks when the disk is far behind."""
        self._unjournaled.extend(answer.generation for answer in answers)
        self._put(answers)

    def unjournaled(self) -> tuple[Generation, ...]:
        """What was handed over to `record` and is not in a journal yet."""
        return tuple(self._unjournaled)  # one step of the interpreter: the thread cannot take one away meanwhile

    def save_partials(self, partials: Iterable[tuple[Generation, tuple[int, ...]]]) -> None:
        """Journal the output so far of generations that go on."""
        self._put([_Records(gen.shard, [PartialRecord(gen.rows, gen.sample, ids)]) for gen, ids in partials])

    def take_committed(self) -> list[tuple[int, PartInfo]]:
        """Shards committed since the last call, with their footers."""
        return [self._committed.get() for _ in range(self._committed.qsize())]

    def take_recorded(self) -> list[Recorded]:
        """Outcomes journaled since the last call."""
        return [self._recorded.get() for _ in range(self._recorded.qsize())]

    def check(self) -> None:
        """Raise what ended the thread, if anything did."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Write, sync and commit everything handed over. Raises what went wrong."""
        self._put(None)
        self._thread.join()
        self.check()

    def _put(self, items: Sequence[_Item] | None) -> None:
        while True:
            self.check()
            try:
                return self._queue.put(items, timeout=0.5)
            except queue.Full:
                continue

    def _run_until_closed(self) -> None:
        try:
            self._write_until_closed()
        except BaseException as failure:  # raised in the owner's thread
            self._failure = failure
        finally:
            self._journals.close()

    def _write_until_closed(self) -> None:
        next_sync = time.monotonic() + self._checkpoint_every
        closing = False
        while not closing:
            items, closing, taken = self._take(next_sync)
            self._write(items)
            if closing or time.monotonic() >= next_sync:
                self._journals.sync()
                next_sync = time.monotonic() + self._checkpoint_every
            self._commit_whole_shards()
            for _ in range(taken):
                self._queue.task_done()

    def _take(self, deadline: float) -> tuple[list[_Item], bool, int]:
        """Everything that waits, whether nothing comes after it, and how many calls handed it over.

        Waits until the deadline for the first of it.
        """
        items: list[_Item] = []
        taken = 0
        timeout = max(0.0, deadline - time.monotonic())
        while True:
            try:
                handed_over = self._queue.get(timeout=timeout)
            except queue.Empty:
                return items, False, taken
            taken += 1
            if handed_over is None:
                return items, True, taken
            items += handed_over
            timeout = 0.0

    def _write(self, items: Sequence[_Item]) -> None:
        records: dict[int, list[JournalRecord | PartialRecord]] = {}
        for item in items:
            match item:
                case _Opened(shard, journal):
                    self._journals.add(shard, journal)
                case _Outstanding(shard, None):
                    self._outstanding.pop(shard, None)
                case _Outstanding(shard, int(outcomes)):
                    self._outstanding[shard] = outcomes
                case _Records(shard, known):
                    records.setdefault(shard, []).extend(known)
                case _Whole(shard):
                    self._whole.add(shard)
        answers = [item for item in items if isinstance(item, Answer)]
        for answer, record in zip(answers, self._reader.records(answers), strict=True):
            shard, failed = answer.generation.shard, record.error_code is not None
            records.setdefault(shard, []).append(record)
            self._recorded.put(Recorded(shard, len(record.rows), failed, failed and answer.completion.error is None))
        for shard, of_shard in records.items():
            self._append(shard, of_shard)
        for _ in answers:
            self._unjournaled.popleft()

    def _append(self, shard: int, records: list[JournalRecord | PartialRecord]) -> None:
        self._journals.append(shard, records)
        if shard in self._outstanding:
            self._outstanding[shard] -= sum(len(record.rows) for record in records if isinstance(record, JournalRecord))

    def _commit_whole_shards(self) -> None:
        whole = self._whole | {shard for shard, outstanding in self._outstanding.items() if outstanding == 0}
        self._whole = set()
        for shard in sorted(whole):
            self._outstanding.pop(shard, None)
            self._journals.drop(shard)
            self._committed.put((shard, commit_shard(self._run, shard, self._identity, self._own_run.check)))
