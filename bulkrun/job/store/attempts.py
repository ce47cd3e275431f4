"""What attempts that failed leave: removed when the next one starts, or on a full disk they would eat what is freed.

Only of processes of this machine that are gone, and nothing that holds a row: neither journals with a line, nor flights
(they convict rows that crash), nor heartbeats that count outputs. Claims of the dead are free anyway.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from bulkrun.data.storage.documents import advice_from
from bulkrun.data.storage.durable import read_json
from bulkrun.errors import RunError
from bulkrun.job.store.journal_files import journals_by_shard
from bulkrun.job.store.run_dir import RunDir, attempt_of, file_names
from bulkrun.job.store.workers import Worker, read_workers

_OLD_S = 120.0  # longer than a network file system may show a folder as it was: a heartbeat elsewhere is seen by then


def forget_failed_attempts(run: RunDir) -> None:
    """Remove them; what cannot be removed stays."""
    # Before the heartbeats: a worker has one before it has a journal.
    journals = [path for paths in journals_by_shard(run).values() for path in paths]
    flying, known = set(run.workers_in_flight()), set(run.worker_ids())
    idle = {
        state.worker.id
        for state in read_workers(run)
        if state.worker.gone and not state.progress.get("num_generations") and state.worker.id not in flying
    }
    nobodys = {attempt_of(path) for path in journals} - known - flying  # a full disk takes the heartbeat away
    useless = [
        path
        for path in journals
        if (attempt_of(path) in idle and _is_empty(path))
        or (attempt_of(path) in nobodys and _is_empty(path, at_least_s=_OLD_S))
    ]
    for path in [*_dead_claims(run), *useless, *map(run.worker_file, idle)]:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _is_empty(path: Path, *, at_least_s: float = 0.0) -> bool:
    """Whether it is, and has been for so long."""
    try:
        found = path.stat()
    except OSError:
        return False
    return found.st_size == 0 and time.time() - found.st_mtime >= at_least_s


def _dead_claims(run: RunDir) -> Iterator[Path]:
    """Those on the plan and on shards, which two may have without harm; that on a change of the run is not touched."""
    names = [name for name in file_names(run.claims) if name.startswith(("plan.", "shard-"))]
    for name in names:
        with suppress(RunError):
            owner = advice_from(Worker, read_json(run.claims / name) or {})
            if owner is not None and owner.gone:
                yield run.claims / name
