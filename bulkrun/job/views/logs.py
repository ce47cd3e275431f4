"""What a run's files say of what happened, as lines for people: its events and its workers' logs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from bulkrun.data.storage.durable import naming
from bulkrun.job.store.events import read_events
from bulkrun.job.store.run_dir import RunDir

_LOOK_EVERY_S = 0.5


def last_events(run: RunDir, number: int) -> list[dict[str, Any]]:
    """The last events, oldest first."""
    return list(deque(read_events(run), maxlen=number))


def follow_events(run: RunDir, sleep: Callable[[float], None] = time.sleep) -> Iterator[str]:
    """Events as they happen from now on, for ever."""
    seen = sum(1 for _ in read_events(run))
    while True:
        events = list(read_events(run))
        yield from map(event_line, events[seen:])
        seen = len(events)
        sleep(_LOOK_EVERY_S)


def worker_logs(run: RunDir, lines: int) -> Iterator[tuple[str, list[str]]]:
    """Name and last lines of each log that has any, the oldest first."""
    logs = [path for path in run.logs.glob("*.log") if path.stat().st_size] if run.logs.is_dir() else []
    for path in sorted(logs, key=lambda path: path.stat().st_mtime_ns):
        with naming(path), path.open(errors="replace") as file:
            yield path.name, [line.rstrip("\n") for line in deque(file, maxlen=lines)]


def event_line(event: dict[str, Any]) -> str:
    """time worker event, then its numbers."""
    numbers = {key: value for key, value in event.items() if key not in ("time", "worker", "event")}
    shown = " ".join(f"{key}={value}" for key, value in numbers.items() if value is not None)
    return f"{event.get('time', '?')} {event.get('worker', '?')} {event.get('event', '?')} {shown}".rstrip()
