"""What was in an engine when its process died: `flight/WORKER.jsonl`. What follows from it: `suspicion`.

A worker appends a line whenever it gives its engine something (one small write, not synced: it must outlive the
process, not the machine), starts the file anew whenever the engine was empty, and removes it when it ends in order. An
output can kill the process that reads it, too: a new file begins with what has left the engine and is not journaled.
Whoever sees the worker die (its supervisor) adds a line with how, and with what had not been journaled by then.

    {"in": [[shard, row, sample], ...]}     given to the engine; `row` is the first row of the generation
    {"finished": true}                      the engine finished something without an error in this worker's life
    {"died": "signal SIGSEGV", "left": [[shard, row, sample], ...]}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bulkrun.data.storage.durable import append_line, disk_errors, make_dirs, read_bytes
from bulkrun.job.store.journal import read_outcomes
from bulkrun.job.store.journal_files import journals_by_shard
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.work.shard_work import Generation

Key = tuple[int, int, int]  # shard, first row, sample: the same in every attempt, for a generation is journaled whole

_LONGEST_BYTES = 1 << 20


def key_of(generation: Generation) -> Key:
    """What flights call a generation."""
    return (generation.shard, generation.rows[0], generation.sample)


class FlightLog:
    """The worker's side. Nothing is written before something is admitted.

    `unjournaled` says what has left the engine and is on its way to the journal.
    """

    def __init__(self, run: RunDir, worker: str, unjournaled: Callable[[], Iterable[Generation]] = tuple) -> None:
        self._path, self._unjournaled = run.flight_file(worker), unjournaled
        self._bytes = 0
        self._finished = False

    def admit(self, generations: Sequence[Generation], in_flight: Iterable[Generation]) -> None:
        """Call before the engine gets `generations`; `in_flight` is everything it has then, them included."""
        everything = list(in_flight)
        anew = len(everything) == len(generations) or self._bytes > _LONGEST_BYTES
        if not self._bytes:
            make_dirs(self._path.parent)
        elif anew:
            with disk_errors("truncating the flight record", self._path):
                self._path.write_bytes(b"")
            self._bytes = 0
        if anew and self._finished:
            self._append({"finished": True})
        alive = [*self._unjournaled(), *everything] if anew else generations
        self._append({"in": [key_of(generation) for generation in alive]})

    def finished(self) -> None:
        """Something ended as it should: if this worker dies now, it was not the first thing it did."""
        if not self._finished:
            self._finished = True
            self._append({"finished": True})

    def close(self) -> None:
        """The worker ends in an orderly way: none of the rows it ran are suspect."""
        with disk_errors("removing the flight record", self._path):
            self._path.unlink(missing_ok=True)

    def _append(self, document: dict[str, Any]) -> None:
        line = json.dumps(document, separators=(",", ":")).encode()
        append_line(self._path, line)
        self._bytes += len(line)


@dataclass
class Flight:
    """A worker's file. `left` is what was in its engine when it died, as far as is known."""

    left: list[Key] = field(default_factory=list)
    finished: bool = False
    died: str | None = None


def read_flight(path: Path) -> Flight:
    """An empty flight when there is no such file; torn lines are left out."""
    flight = Flight()
    try:
        lines = read_bytes(path).splitlines()
    except FileNotFoundError:
        return flight
    for line in lines:
        try:
            document = json.loads(line)
        except ValueError:
            continue
        flight.finished |= "finished" in document
        flight.left += [(shard, row, sample) for shard, row, sample in document.get("in", ())]
        if "died" in document:
            flight.died = document["died"]
            flight.left = [(shard, row, sample) for shard, row, sample in document["left"]]
    return flight


def record_death(run: RunDir, worker: str, how: str) -> Flight:
    """The supervisor's side: note how a worker died and with what in its engine. Returns its flight."""
    path = run.flight_file(worker)
    flight = read_flight(path)
    left = _not_journaled(run, flight.left)
    if left:
        append_line(path, json.dumps({"died": how, "left": left}, separators=(",", ":")).encode())
    else:
        with disk_errors("removing", path):
            path.unlink(missing_ok=True)
    return replace(flight, died=how, left=left)


def _not_journaled(run: RunDir, keys: Sequence[Key]) -> list[Key]:
    """Those of `keys` without an outcome, by shard. The journals are listed after the parts: they go with a commit."""
    of_shard: dict[int, list[Key]] = {}
    for key in keys:
        of_shard.setdefault(key[0], []).append(key)
    committed, journals = run.committed_shards(), journals_by_shard(run)
    left: list[Key] = []
    for shard in sorted(of_shard.keys() - committed):
        answered = read_outcomes(journals.get(shard, [])).answered
        left += [key for key in of_shard[shard] if key[1:] not in answered]
    return left
