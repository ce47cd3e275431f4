"""Who works on a run, by the heartbeat files of all, and whether another worker still lives.

Every process has a random id; Slurm job ids, hosts and pids are not unique. A heartbeat (`heartbeat` writes it) is a
counter in `workers/<id>.json` with live numbers beside it. A worker is dead when its counter did not change for a while
on MY monotonic clock, so clocks are never compared between hosts; or at once when it said goodbye, or ran here and its
process is gone. All of this is advice: results are safe whatever it says.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bulkrun.data.storage.documents import advice_from
from bulkrun.data.storage.durable import read_json
from bulkrun.errors import RunError
from bulkrun.job.store.run_dir import RunDir
from bulkrun.process_identity import start_time, this_place

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
        return self.place == this_place() and start_time(self.pid) != self.started

    @classmethod
    def this_process(cls, worker_id: str | None = None) -> Worker:
        """This process under a new random id, or under the one that its supervisor gave it."""
        return cls(worker_id or secrets.token_hex(6), this_place(), os.getpid(), start_time(os.getpid()) or "")


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
    if age >= young_s and state.worker.place != this_place():
        return False
    for _ in range(_LOOKS):
        sleep(HEARTBEAT_S * 1.5 / _LOOKS)
        now = read_worker(run, state.worker.id)
        if now is None or now.gone or now.counter != state.counter:
            return now is not None and not now.gone
    return False


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
