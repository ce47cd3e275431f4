"""Who works on a run: a worker's identity, its heartbeat file, and whether another worker still lives.

Every process has a random id; Slurm job ids, hosts and pids are not unique. A heartbeat is a counter in
`workers/<id>.json`, replaced by a thread, with live numbers beside it. A worker is dead when its counter did not
change for a while on MY monotonic clock, so clocks are never compared between hosts; or at once when it said
goodbye, or ran here and its process is gone. All of this is advice: results are safe whatever it says.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bulkrun.data.storage.documents import advice_from
from bulkrun.data.storage.durable import read_json, replace_json
from bulkrun.errors import Interrupted, RunError
from bulkrun.job.store.run_dir import RunDir

HEARTBEAT_S = 3.0
TTL_S = 30.0  # at least 10 heartbeats: a shorter one lets busy workers take shards from each other without end
_CLOCKS_DIFFER_S = 60.0  # more than clocks that are kept in step do
_LOOKS = 9


@dataclass(frozen=True)
class Worker:
    """One process. `place` names the machine, boot and pid namespace in which `pid` means something."""

    id: str
    place: str
    pid: int
    started: str  # start time of the process in clock ticks: pids are reused

    @property
    def gone(self) -> bool:
        """Whether it ran on this machine and its process is gone."""
        return self.place == _place() and _start_time(self.pid) != self.started

    @classmethod
    def this_process(cls, worker_id: str | None = None) -> Worker:
        """This process under a new random id, or under the one that its supervisor gave it."""
        return cls(worker_id or secrets.token_hex(6), _place(), os.getpid(), _start_time(os.getpid()) or "")


def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        boot, namespace = "", ""
    return "|".join((socket.gethostname(), boot, namespace))


def _start_time(pid: int) -> str | None:
    """When a process started, "" where the system does not tell, None when it is gone (or a zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return None if Path("/proc/self/stat").exists() or not _answers(pid) else ""
    except OSError:
        return ""
    return None if fields[0] in "ZX" else fields[19]


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


@dataclass(frozen=True)
class WorkerState:
    """A worker's heartbeat file. `ended` is how it ended, None while it works (or was killed)."""

    worker: Worker
    counter: int
    role: str
    ended: str | None = None
    message: str | None = None
    progress: dict[str, Any] = field(default_factory=dict)

    @property
    def gone(self) -> bool:
        """Whether the worker is surely gone: it said goodbye, or its process on this machine has ended."""
        return self.ended is not None or self.worker.gone


def read_worker(run: RunDir, worker_id: str) -> WorkerState | None:
    """A worker's last heartbeat; None when there is none (or a power cut emptied it, or it is not a heartbeat)."""
    try:
        document = read_json(run.worker_file(worker_id))
    except RunError:
        return None
    worker = advice_from(Worker, (document or {}).get("worker", {}))
    return advice_from(WorkerState, {**document, "worker": worker}) if document and worker else None


def read_workers(run: RunDir) -> list[WorkerState]:
    """All workers that ever had a heartbeat in this run."""
    return [state for worker_id in run.worker_ids() if (state := read_worker(run, worker_id))]


def silent_for(run: RunDir, worker_id: str) -> float:
    """Seconds since a worker's last heartbeat by the clocks of this host and the file server; only ever shown."""
    return max(0.0, _age(run, worker_id))


def _age(run: RunDir, worker_id: str) -> float:
    """As the clocks say: below zero for a heartbeat in the future."""
    try:
        beat = run.worker_file(worker_id).stat().st_mtime
    except FileNotFoundError:
        beat = 0.0
    return time.time() - beat


def beats(
    run: RunDir, state: WorkerState, young_s: float = TTL_S, *, sleep: Callable[[float], None] = time.sleep
) -> bool:
    """Whether a worker that is not gone has a heartbeat younger than `young_s`; takes seconds where a clock is off.

    A heartbeat in the future, or an old one of a process that is there on this machine, may be a clock's fault: such a
    worker beats if its counter moves.
    """
    age = _age(run, state.worker.id)
    if -_CLOCKS_DIFFER_S <= age < young_s:
        return True
    if age >= young_s and state.worker.place != _place():
        return False
    for _ in range(_LOOKS):
        sleep(HEARTBEAT_S * 1.5 / _LOOKS)
        now = read_worker(run, state.worker.id)
        if now is None or now.gone or now.counter != state.counter:
            return now is not None and not now.gone
    return False


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


class LifeWatch:
    """Remembers when each worker's counter last changed, on this process's monotonic clock."""

    def __init__(self, run: RunDir, *, ttl_s: float = TTL_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._ttl_s, self._clock = run, ttl_s, clock
        self._seen: dict[str, tuple[int, float]] = {}

    def alive(self, worker: Worker) -> bool:
        """Whether a worker must be taken for alive. One seen for the first time is, unless it is surely gone."""
        return self._moves(worker, read_worker(self._run, worker.id))

    def lives(self, worker_id: str) -> bool:
        """The same of a worker known by its id alone; one without a heartbeat does not live."""
        state = read_worker(self._run, worker_id)
        return state is not None and self._moves(state.worker, state)

    def _moves(self, worker: Worker, state: WorkerState | None) -> bool:
        if worker.gone or (state is not None and state.gone):
            return False
        counter = state.counter if state else -1
        known, since = self._seen.get(worker.id, (None, 0.0))
        now = self._clock()
        if counter != known:
            self._seen[worker.id] = (counter, now)
            return True
        return now - since < self._ttl_s
