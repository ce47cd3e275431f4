"""What happened in a run, one JSON line each in `.bulkrun/events.jsonl`: ids and numbers only, never prompt text.

A log for people and reports. Nothing is decided by it: a lost or torn line costs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from bulkrun.data.storage.durable import append_line, naming
from bulkrun.errors import RunError
from bulkrun.job.store.run_dir import RunDir

Scalar = str | int | float | bool | None


def utc_now() -> str:
    """The wall clock as ISO 8601 with a Z, to the millisecond. For people: nothing is compared with it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def log_event(run: RunDir, worker: str, event: str, **numbers: Scalar) -> None:
    """Append one event with one write, so that lines of several processes do not mix.

    Where the disk does not take it there is none: it ends no work that it is only about.
    """
    record = {"time": utc_now(), "event": event, "worker": worker, **numbers}
    with suppress(RunError):  # of the disk
        append_line(run.events, json.dumps(record, ensure_ascii=False).encode())


def read_events(run: RunDir) -> Iterator[dict[str, Any]]:
    """The events in file order; lines that a crash tore are left out."""
    if not run.events.is_file():
        return
    with naming(run.events), run.events.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record
