"""The thread that puts parts into the bucket while the run goes on: a head start on `deliver`, off the engine's path.

A store that fails never stops a run: the thread tries again with growing pauses, and what it could not put is left
to the end of the run or to its next start.
"""

from __future__ import annotations

import queue
import threading
from pathlib import Path

from bulkrun.data.storage.patience import Patience
from bulkrun.errors import RunError
from bulkrun.job.store.bucket_owner import name_of
from bulkrun.job.store.events import log_event
from bulkrun.job.store.object_store import ObjectPrefix
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import RunRecord
from bulkrun.job.work.delivery import LONGEST_PAUSE_S, put_part

_STOP_S = 5.0  # a drain has to end within ten


class Uploads:
    """Nothing at all for a run without a bucket. Public methods are for the runner's thread."""

    def __init__(self, run: RunDir, record: RunRecord, worker: str) -> None:
        self._run, self._worker = run, worker
        self._prefix = record.bucket()
        self._parts: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)

    def start(self) -> None:
        """Begin, with the parts that earlier attempts published and did not put."""
        if self._prefix is not None:
            self._thread.start()

    def add(self, part: Path) -> None:
        """This worker published a part."""
        self._parts.put(part)

    def stop(self) -> None:
        """End after the request under way, or without it where that takes long."""
        self._stopping.set()
        self._parts.put(None)
        if self._thread.is_alive():
            self._thread.join(_STOP_S)

    def _work(self) -> None:
        assert self._prefix is not None, "start saw it"
        self._insist(self._prefix, None)
        while not self._stopping.is_set() and (part := self._parts.get()) is not None:
            self._insist(self._prefix, part)

    def _insist(self, prefix: ObjectPrefix, part: Path | None) -> None:
        patience = Patience(LONGEST_PAUSE_S)
        while not self._stopping.is_set():
            try:
                return self._put(prefix, part)
            except RunError as error:
                log_event(self._run, self._worker, "upload_failed", reason=str(error))
            patience.pause(self._stopping.wait)

    def _put(self, prefix: ObjectPrefix, part: Path | None) -> None:
        """One part, or (None) every part whose name is missing. Whether an object is ours is seen at the end."""
        if part is not None:
            put_part(self._run, prefix, part)
            return
        there = prefix.list()
        for path in self._run.parts().values():
            if self._stopping.is_set():
                return
            if name_of(self._run, path) not in there:
                put_part(self._run, prefix, path)
