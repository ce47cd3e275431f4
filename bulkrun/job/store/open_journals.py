"""The journals of one attempt: a worker may have more shards open than its process may open files.

The least recently written journal gives its descriptor back when there are too many. A checkpoint syncs every journal
that was written since the last one, whether it has a descriptor or not. Knows no answers.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from contextlib import suppress

from bulkrun.errors import RunError
from bulkrun.job.store.journal import JournalGone, JournalRecord, JournalWriter, PartialRecord

_MOST_OPEN = 1024


def most_open() -> int:
    """How many journals may be open: a quarter of the files that this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_OPEN if soft == resource.RLIM_INFINITY else max(1, min(soft // 4, _MOST_OPEN))


class OpenJournals:
    """The journals by shard, for one thread.

    `check_ours` raises where the run was replaced: asked when a journal is gone. Otherwise another worker has committed
    the shard, and what would be appended has no use; a commit that finds an outcome missing says so.
    """

    def __init__(self, check_ours: Callable[[], None], most: int | None = None) -> None:
        self._check_ours, self._most = check_ours, most or most_open()
        self._journals: dict[int, JournalWriter] = {}
        self._open: dict[int, JournalWriter] = {}  # the least recently used one first

    def add(self, shard: int, journal: JournalWriter) -> None:
        """Write to this journal what comes of the shard."""
        self._journals[shard] = journal

    def append(self, shard: int, records: Sequence[JournalRecord | PartialRecord]) -> None:
        """Write nothing for a shard without a journal: another worker was faster."""
        if records and shard in self._journals:
            self._use(shard, lambda journal: journal.append(records))

    def sync(self) -> None:
        """Make everything appended survive a power cut."""
        for shard in [shard for shard, journal in self._journals.items() if journal.dirty]:
            self._use(shard, JournalWriter.sync)

    def drop(self, shard: int) -> None:
        """Forget the journal of a shard that is being committed."""
        self._open.pop(shard, None)
        if journal := self._journals.pop(shard, None):
            journal.release()

    def close(self) -> None:
        """Give all descriptors back. What matters was synced before, or has failed already."""
        for journal in self._open.values():
            with suppress(RunError):
                journal.release()
        self._open.clear()

    def _use(self, shard: int, what: Callable[[JournalWriter], None]) -> None:
        journal = self._open.pop(shard, self._journals[shard])
        if len(self._open) >= self._most:
            self._open.pop(next(iter(self._open))).release()
        try:
            self._open[shard] = journal
            what(journal)
        except JournalGone:
            self._check_ours()
            self.drop(shard)
