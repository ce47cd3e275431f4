"""A worker's own heartbeat: its file in `workers/`, replaced every few seconds by a thread, with its last words.

What others conclude from it is the matter of `workers`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

from bulkrun.data.storage.durable import replace_json
from bulkrun.errors import Interrupted, RunError
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.workers import HEARTBEAT_S, Worker, WorkerState


class Heartbeat:
    """Writes this worker's file every few seconds from a thread, until `stop` writes how it ended.

    `snapshot` returns the numbers to publish (JSON values). A failing disk ends the thread; the error comes out of
    `check`, so that the worker stops instead of being taken for dead while it works.
    """

    def __init__(
        self,
        run: RunDir,
        worker: Worker,
        snapshot: Callable[[], dict[str, Any]],
        *,
        role: str = "runner",
        interval_s: float = HEARTBEAT_S,
    ) -> None:
        self._path = run.worker_file(worker.id)
        self._worker, self._snapshot, self._role = worker, snapshot, role
        self._interval_s = interval_s
        self._counter = 0
        self._stopping = threading.Event()
        self._failure: RunError | None = None
        self._thread = threading.Thread(target=self._beat_until_stopped, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Beat once, so that the file is there when this returns, and go on in a thread. Raises RunError."""
        self._beat()
        self._thread.start()

    def check(self) -> None:
        """Raise the RunError that ended the thread, if any."""
        if self._failure:
            raise self._failure

    def stop(self, ended: str, message: str | None = None) -> None:
        """End the thread and say goodbye: others may take this worker's shards at once.

        Raises nothing: what stopped the worker matters more. Where a goodbye cannot be written (a full disk) the file
        is removed, or it would claim a worker that is gone while its process lives on.
        """
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        try:
            self._beat(ended, message)
        except RunError:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)

    def _beat_until_stopped(self) -> None:
        while not self._stopping.wait(self._interval_s):
            try:
                self._beat()
            except RunError as error:
                self._failure = error
                return

    def _beat(self, ended: str | None = None, message: str | None = None) -> None:
        self._counter += 1
        state = WorkerState(self._worker, self._counter, self._role, ended, message, self._snapshot())
        replace_json(self._path, asdict(state), sync=False)


@contextmanager
def present(run: RunDir, worker: Worker, role: str) -> Iterator[None]:
    """Show a process that computes no rows among those of the run while the body runs, and then how that ended.

    A signal is an interruption; any other exception is a failure, also one that nobody foresaw.
    """
    heartbeat = Heartbeat(run, worker, dict, role=role)
    heartbeat.start()
    try:
        yield
    except (Interrupted, KeyboardInterrupt):
        heartbeat.stop("interrupted")
        raise
    except BaseException as error:
        heartbeat.stop("failed", f"{type(error).__name__}: {error}")
        raise
    heartbeat.stop("completed")
