"""The layout of a run directory: every path in it, by name, and where the parts lie. Knows no contents.

    <output.path>/
      part-00000.parquet ...            results; a shard is done if and only if its part exists
      lang=en/part-00000.parquet ...    the same with output.partition_by; numbers are unique over all folders
      _SUCCESS                          totals, written last
      .bulkrun/run.json                 resolved spec and fingerprints
      .bulkrun/input.snapshot           the result of input.sql (Parquet), fixed when the run started
      .bulkrun/plan/shard-00000.arrow   a planned shard
      .bulkrun/plan/window-00000.json   a window whose shards are all there
      .bulkrun/plan/ids-00000.u64       hashes of a window's ids, until the plan is complete
      .bulkrun/plan/complete.json       the plan is complete
      .bulkrun/claims/NAME.EPOCH        advice: who works on what
      .bulkrun/journal/shard-00000.ATTEMPT.jsonl   finished rows of an open shard
      .bulkrun/flight/WORKER.jsonl      which generations are in a worker's engine, should it die
      .bulkrun/workers/WORKER.json      heartbeat and live counters of a process
      .bulkrun/events.jsonl             what happened, one JSON line each
      .bulkrun/cancelled.json           the last request of `bulkrun cancel`
      .bulkrun/given_up.json            the failures for which a worker gave up (run.max_error_rate)
      .bulkrun/logs/                    what workers wrote on stderr
      .bulkrun/slurm/                   batch scripts, and the ids of the jobs they became
      .bulkrun/tmp/                     files that are not whole yet
      .bulkrun/tmp/spool/WORKER/        those of a planner: the rows of the window that it is planning
      .bulkrun/delivered.json           with results in a bucket: what it holds of them
      .bulkrun/next/                    a whole run of its own: the rows of a retry or an incremental night
      .bulkrun/next/.bulkrun/input.subset   its input: the rows to run, each with the result row that it answers
      .bulkrun/next/.bulkrun/update.json    what it changes; merge.json: which of its parts go into the results
      .bulkrun/settling.json            an unfinished incremental run is being ended with the rows it has

Nothing under .bulkrun ends in .parquet (DuckDB's `**` globs enter dot folders), and
`<output.path>/*.parquet` (with partitions `<output.path>/**/*.parquet`) matches parts alone.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from bulkrun.data.storage.durable import make_dirs
from bulkrun.data.storage.partitions import PART_NAME, find_parts
from bulkrun.errors import RunError

_SHARD = re.compile(r"shard-(\d{5,})\.arrow")
JOURNAL_NAME = re.compile(r"shard-(\d{5,})\.([^.]+)\.jsonl")


@dataclass(frozen=True)
class RunDir:
    """Names in one run directory. Remembers where it saw parts: they keep their places."""

    root: Path
    _seen: dict[int, Path] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def staged(self) -> RunDir:
        """The run inside this run that computes what a retry or an incremental night changes."""
        return RunDir(self.state / "next")

    @property
    def is_staged(self) -> bool:
        """Whether this is such a run: its parts are not results yet, and no glob for Parquet may find them."""
        return (self.root.parent.name, self.root.name) == (".bulkrun", "next")

    @property
    def subset(self) -> Path:
        """The input of a staged run."""
        return self.state / "input.subset"

    @property
    def update(self) -> Path:
        """What a staged run changes."""
        return self.state / "update.json"

    @property
    def merging(self) -> Path:
        """Which parts of a staged run go into the results; written when the merge begins."""
        return self.state / "merge.json"

    @property
    def settling(self) -> Path:
        """The mark of an unfinished run that is being ended with the rows it has."""
        return self.state / "settling.json"

    @property
    def state(self) -> Path:
        return self.root / ".bulkrun"

    @property
    def run_json(self) -> Path:
        return self.state / "run.json"

    @property
    def success(self) -> Path:
        return self.root / "_SUCCESS"

    @property
    def plan(self) -> Path:
        return self.state / "plan"

    @property
    def plan_complete(self) -> Path:
        return self.plan / "complete.json"

    @property
    def spool(self) -> Path:
        """Where planners keep the rows of the window they are planning, each in a folder named by its worker id."""
        return self.state / "tmp" / "spool"

    @property
    def claims(self) -> Path:
        return self.state / "claims"

    @property
    def journal(self) -> Path:
        return self.state / "journal"

    @property
    def flight(self) -> Path:
        return self.state / "flight"

    @property
    def workers(self) -> Path:
        return self.state / "workers"

    @property
    def _shown(self) -> Path:
        """The folder of what people read: a staged run writes its events and logs to the run around it."""
        return self.root.parent if self.is_staged else self.state

    @property
    def events(self) -> Path:
        return self._shown / "events.jsonl"

    @property
    def cancelled(self) -> Path:
        return self._shown / "cancelled.json"

    @property
    def given_up(self) -> Path:
        return self.state / "given_up.json"

    @property
    def delivered(self) -> Path:
        """Says for which `_SUCCESS` the bucket of this run is complete."""
        return self.state / "delivered.json"

    @property
    def logs(self) -> Path:
        """The folder with what workers wrote on stderr."""
        return self._shown / "logs"

    @property
    def slurm(self) -> Path:
        """The batch scripts that were submitted for this run."""
        return self.state / "slurm"

    @property
    def slurm_jobs(self) -> Path:
        return self.slurm / "jobs.jsonl"

    @property
    def tmp(self) -> Path:
        return self.state / "tmp"

    @property
    def sql_snapshot(self) -> Path:
        return self.state / "input.snapshot"

    def part(self, shard: int, folder: str | None = None) -> Path:
        """The part of a shard in the partition `folder` ("": the root).

        Without a folder: where the part lies, looked for if need be; in the root when there is none yet.
        """
        name = f"part-{shard:05d}.{'staged' if self.is_staged else 'parquet'}"
        if folder is not None:
            return self.root / folder / name
        if shard not in self._seen and not (self.root / name).exists():
            self.parts()
        return self._seen.get(shard, self.root / name)

    def parts(self) -> dict[int, Path]:
        """All committed parts by number, as they lie there now. Raises RunError when two have one number."""
        found: dict[int, Path] = {}
        for path in find_parts(self.root):
            match = PART_NAME.fullmatch(path.name)
            assert match, "find_parts yields parts"
            if (other := found.setdefault(int(match[1]), path)) != path:
                raise RunError(
                    f"{path}: has the same number as {other}; move away the one that does not belong to this run"
                )
        self._seen.update(found)
        return found

    def shard(self, shard: int) -> Path:
        return self.plan / f"shard-{shard:05d}.arrow"

    def window(self, window: int) -> Path:
        return self.plan / f"window-{window:05d}.json"

    def ids(self, window: int) -> Path:
        return self.plan / f"ids-{window:05d}.u64"

    def id_files(self) -> list[Path]:
        return sorted(self.plan.glob("ids-*.u64"))

    def journal_file(self, shard: int, attempt: str) -> Path:
        return self.journal / f"shard-{shard:05d}.{attempt}.jsonl"

    def journals_of(self, shard: int) -> list[Path]:
        return [path for path in _beginning(self.journal, f"shard-{shard:05d}.") if JOURNAL_NAME.fullmatch(path.name)]

    def attempts_at(self, shard: int) -> set[str]:
        """The attempts that have a journal of the shard: the ids of workers."""
        return set(map(attempt_of, self.journals_of(shard)))

    def journaled_shards(self) -> set[int]:
        """Shards with a journal: the open ones, and what a late worker or a kill left of committed ones."""
        return _numbers(self.journal, JOURNAL_NAME)

    def shard_claim(self, shard: int) -> str:
        """A shard's name in `claims`."""
        return f"shard-{shard:05d}"

    def claims_of(self, name: str) -> list[Path]:
        return _beginning(self.claims, f"{name}.")

    def flight_file(self, worker: str) -> Path:
        return self.flight / f"{worker}.jsonl"

    def workers_in_flight(self) -> list[str]:
        """The ids of workers that have a flight file: they live, or died with something in the engine."""
        return _stems(self.flight, "*.jsonl")

    def worker_file(self, worker: str) -> Path:
        return self.workers / f"{worker}.json"

    def worker_ids(self) -> list[str]:
        """The ids of all processes that ever had a heartbeat in this run."""
        return _stems(self.workers, "*.json")

    def committed_shards(self) -> set[int]:
        return set(self.parts())

    @property
    def holds_results(self) -> bool:
        """Whether any attempt left results: parts, or rows of open shards."""
        return bool(self.committed_shards() or self.journaled_shards())

    def planned_shards(self) -> set[int]:
        return _numbers(self.plan, _SHARD)


def attempt_of(journal: Path) -> str:
    """Who wrote a journal: the id of a worker."""
    match = JOURNAL_NAME.fullmatch(journal.name)
    assert match, "one that was found as a journal"
    return match[2]


def _numbers(folder: Path, pattern: re.Pattern[str]) -> set[int]:
    return {int(match[1]) for name in file_names(folder) if (match := pattern.fullmatch(name))}


def _beginning(folder: Path, prefix: str) -> list[Path]:
    return sorted(folder / name for name in file_names(folder) if name.startswith(prefix))


def file_names(folder: Path) -> list[str]:
    """Plain text: workers ask for every shard, in folders that hold files of every open one."""
    try:
        return [entry.name for entry in os.scandir(folder)]
    except FileNotFoundError:
        return []


def make_state_dirs(run: RunDir) -> None:
    """The folders of the state. A finished run has empty ones, which many a copy (object stores, git) leaves out."""
    for folder in (run.plan, run.claims, run.journal, run.workers, run.tmp):
        make_dirs(folder)


def _stems(folder: Path, pattern: str) -> list[str]:
    """Names without their endings; a name that begins with a dot is of a file that is not whole yet."""
    return sorted(path.stem for path in folder.glob(pattern) if not path.name.startswith("."))
