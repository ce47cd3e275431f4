"""Results of a run in a bucket: parts go there as they are committed, what is missing at the end, `_SUCCESS` last.

The run's directory is the truth, the bucket its copy: a part is put after it was published there, only if absent (or
for one that was damaged here and made again, in its place). So a kill at any instant leaves whole objects, each row at
most once; the same command again puts what is missing.
`delivered.json` says for which `_SUCCESS` the bucket is complete: a finished run that is submitted again asks the
store nothing.

A later generation (retry, an incremental night, compact) replaces objects by plain puts, after its swap in the
directory. Each object is whole at every moment, but several cannot change in one step: from when the old `_SUCCESS`
goes until the new one is there, a reader of many objects may see old parts beside new ones, and so, where rows moved
between parts (compact), a row twice. Knows no engine.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from bulkrun.data.results.parts import read_part_info
from bulkrun.data.storage.durable import read_bytes, read_json, replace_json
from bulkrun.data.storage.patience import Patience
from bulkrun.errors import Interrupted, RunError
from bulkrun.job.store.bucket_owner import SUCCESS, name_of
from bulkrun.job.store.events import log_event
from bulkrun.job.store.object_store import ObjectPrefix, is_transient
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import RunRecord

LONGEST_PAUSE_S = 60.0
_PATIENCE_S = 300.0  # with a store that fails, before the command gives up (nothing is lost then)

ShouldStop = Callable[[], bool]
_T = TypeVar("_T")


def deliver(
    run: RunDir, record: RunRecord, should_stop: ShouldStop = lambda: False, *, anew: bool = False
) -> int | None:
    """Make the bucket of a run hold what its directory holds now; nothing to do for a local run.

    `anew`: also where the bucket was complete, since somebody may have removed something. Returns how many parts were
    uploaded, None where the bucket was complete. Safe to repeat, and by several processes of which none changes the
    run. Raises Interrupted when told to stop, RunError for an object that is not of this run
    and when the store refuses, or fails for some minutes; the same command then goes on.
    """
    prefix = record.bucket()
    if prefix is None or (is_delivered(run) and not anew):
        return None
    return _Delivery(run, prefix, should_stop).put_all()


def lacks_results(run: RunDir, record: RunRecord) -> bool:
    """Whether a finished run has a bucket that is not complete. Asks no store."""
    return record.bucket_url is not None and run.success.exists() and not is_delivered(run)


def lacks_objects(run: RunDir, record: RunRecord, should_stop: ShouldStop) -> bool:
    """Whether something of a finished run has no object of its name in the bucket. Asks the store."""
    prefix = record.bucket()
    return prefix is not None and not _Delivery(run, prefix, should_stop).lacks_nothing


def is_delivered(run: RunDir) -> bool:
    """Whether the bucket is complete for the `_SUCCESS` that is there now. Asks no store."""
    ledger = read_json(run.delivered)
    return ledger is not None and run.success.exists() and ledger["success"] == content_digest(run.success)


def put_part(run: RunDir, prefix: ObjectPrefix, path: Path) -> bool:
    """Put one part if there is no such object. Returns whether the object there is this part."""
    return prefix.put_new(path, name_of(run, path), read_part_info(path).attempt)


def content_digest(path: Path) -> str:
    """What tells one `_SUCCESS` from another."""
    return hashlib.blake2b(read_bytes(path), digest_size=16).hexdigest()


class _Delivery:
    """One pass over all parts. The ledger names every object that may be there by our hand, with what it holds.

    `attempt` tells a part from any other; "" in the ledger: not known to be there yet.
    """

    def __init__(self, run: RunDir, prefix: ObjectPrefix, should_stop: ShouldStop) -> None:
        self._run, self._prefix, self._should_stop = run, prefix, should_stop
        self._parts = {name_of(run, path): path for path in run.parts().values()}
        self._known: dict[str, str] = (read_json(run.delivered) or {}).get("parts", {})
        self._there = self._try(prefix.list)
        self._uploaded = 0

    @property
    def lacks_nothing(self) -> bool:
        """Whether there is an object of every name."""
        return {SUCCESS, *self._parts} <= self._there.keys()

    def put_all(self) -> int:
        """Upload parts, remove obsolete ones, then upload `_SUCCESS` if the run is finished; how many parts."""
        self._refuse_foreign()
        digest = content_digest(self._run.success) if self._run.success.exists() else None
        self._withdraw_old_success(digest)
        self._note(dict.fromkeys(self._parts, "") | self._known)
        delivered = {name: self._bring(name, path) for name, path in sorted(self._parts.items())}
        for name in sorted((self._known.keys() & self._there.keys()) - self._parts.keys()):
            self._try(partial(self._prefix.remove, name))
        self._note(delivered)
        if digest is not None:
            self._try(lambda: self._prefix.put(self._run.success, SUCCESS, digest))
            self._prefix.end_uploads({SUCCESS, *self._parts, *self._known})
            self._note(delivered, digest)
            log_event(self._run, "-", "delivered", parts=len(delivered))
        return self._uploaded

    def _note(self, parts: dict[str, str], success: str | None = None) -> None:
        replace_json(self._run.delivered, {"success": success, "parts": parts})

    def _refuse_foreign(self) -> None:
        """Another program's Parquet among the results would be read as results."""
        foreign = sorted(self._there.keys() - self._parts.keys() - self._known.keys())
        for name in foreign:
            if name.endswith(".parquet"):
                raise RunError(f"{self._prefix.url}/{name}: not a part of this run; move it away, then run it again")

    def _bring(self, name: str, path: Path) -> str:
        """Have one part in the bucket; its attempt."""
        info = read_part_info(path)
        etag, attempt = self._there.get(name), info.attempt
        if etag is not None and self._known.get(name) == attempt:
            return attempt
        if etag is not None and self._try(lambda: self._prefix.holds(path, name, attempt, etag)):
            return attempt
        self._uploaded += 1
        if self._try(lambda: self._prefix.put_new(path, name, attempt)):
            return attempt
        if not info.generation and self._try(lambda: self._prefix.nonce(name)) != self._known.get(name, ""):
            raise RunError(f"{self._prefix.url}/{name}: another program put this; move it away, then run it again")
        self._try(lambda: self._prefix.put(path, name, attempt))
        return attempt

    def _withdraw_old_success(self, digest: str | None) -> None:
        """Before the first change that a reader could see half of."""
        if SUCCESS in self._there and self._try(lambda: self._prefix.nonce(SUCCESS)) != digest:
            self._try(lambda: self._prefix.remove(SUCCESS))

    def _try(self, request: Callable[[], _T]) -> _T:
        """The request, again and again with growing pauses while the store fails for a time."""
        patience = Patience(LONGEST_PAUSE_S, _PATIENCE_S)
        while True:
            if self._should_stop():
                raise Interrupted(
                    f"stopped while the results were uploaded to {self._prefix.url}: they are whole in "
                    f"{self._run.root}; run the same command again to go on"
                )
            try:
                return request()
            except RunError as error:
                if not is_transient(error) or patience.is_over:
                    raise
            patience.pause(self._wait)

    def _wait(self, pause: float) -> None:
        until = time.monotonic() + pause
        while time.monotonic() < until and not self._should_stop():
            time.sleep(0.1)
