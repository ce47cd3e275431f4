"""The layout of a run directory: every path in it, by name. Knows no contents.

    <output.path>/
      part-00000.parquet ...            results; a shard is done if and only if its part exists
      _SUCCESS                          totals, written last
      .bulkrun/run.json                 resolved spec and fingerprints
      .bulkrun/input.snapshot           the result of input.sql (Parquet), fixed when the run started
      .bulkrun/plan/shard-00000.arrow   a planned shard
      .bulkrun/plan/window-00000.json   a window whose shards are all there
      .bulkrun/plan/complete.json       the plan is complete
      .bulkrun/claims/NAME.EPOCH        advice: who works on what
      .bulkrun/journal/shard-00000.ATTEMPT.jsonl   finished rows of an open shard
      .bulkrun/workers/WORKER.json      heartbeat and live counters of a process
      .bulkrun/events.jsonl             what happened, one JSON line each
      .bulkrun/cancelled.json           which workers `bulkrun cancel` asked to stop
      .bulkrun/logs/                    what workers wrote on stderr
      .bulkrun/slurm/                   batch scripts, and the ids of the jobs they became
      .bulkrun/tmp/                     files that are not whole yet
      .bulkrun/next/                    a whole run of its own: the rows of a retry or an incremental night

Nothing under .bulkrun ends in .parquet (DuckDB's `**` globs enter dot folders), and
`<output.path>/*.parquet` matches parts alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_PART = re.compile(r"part-(\d{5,})\.(?:parquet|staged)")
_SHARD = re.compile(r"shard-(\d{5,})\.arrow")


@dataclass(frozen=True)
class RunDir:
    """Names in one run directory."""

    root: Path

    @property
    def staged(self) -> RunDir:
        """The run inside this run that computes what a retry or an incremental night changes."""
        return RunDir(self.state / "next")

    @property
    def is_staged(self) -> bool:
        """Whether this is such a run: its parts are not results yet, and no glob for Parquet may find them."""
        return self.root.parent.name == ".bulkrun"

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
        """Where the planner keeps the rows of the window it is planning."""
        return self.state / "tmp" / "spool"

    @property
    def claims(self) -> Path:
        return self.state / "claims"

    @property
    def journal(self) -> Path:
        return self.state / "journal"

    @property
    def workers(self) -> Path:
        return self.state / "workers"

    @property
    def events(self) -> Path:
        return self.state / "events.jsonl"

    @property
    def cancelled(self) -> Path:
        return self.state / "cancelled.json"

    @property
    def logs(self) -> Path:
        """What workers wrote on stderr."""
        return self.state / "logs"

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

    def part(self, shard: int) -> Path:
        return self.root / f"part-{shard:05d}.{'staged' if self.is_staged else 'parquet'}"

    def shard(self, shard: int) -> Path:
        return self.plan / f"shard-{shard:05d}.arrow"

    def window(self, window: int) -> Path:
        return self.plan / f"window-{window:05d}.json"

    def journal_file(self, shard: int, attempt: str) -> Path:
        return self.journal / f"shard-{shard:05d}.{attempt}.jsonl"

    def journals_of(self, shard: int) -> list[Path]:
        return sorted(self.journal.glob(f"shard-{shard:05d}.*.jsonl"))

    def committed_shards(self) -> set[int]:
        return _numbers(self.root, _PART)

    def planned_shards(self) -> set[int]:
        return _numbers(self.plan, _SHARD)


def _numbers(folder: Path, pattern: re.Pattern[str]) -> set[int]:
    if not folder.is_dir():
        return set()
    return {int(match[1]) for path in folder.iterdir() if (match := pattern.fullmatch(path.name))}
