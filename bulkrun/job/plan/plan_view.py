"""How far the plan and its shards are, as files tell: planned, committed, complete. Reads, never writes.

Shards are immutable and published one by one while the planner goes on, so each is read once; what is committed is
asked of the directory again and again, because other workers commit too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bulkrun.data.storage.durable import read_json
from bulkrun.job.plan.shard_file import ShardInfo, read_shard_info
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import RunRecord

PLAN_HASH = "plan_hash"  # in the end marker of a plan: of the record that it was made for


@dataclass(frozen=True)
class PlannedCounts:
    """Input rows planned so far, and how many of them can never run (too long, unreadable, ...)."""

    rows: int
    errors: int


def is_outdated(run: RunDir, record: RunRecord) -> bool:
    """Whether a night has given the run another input, or other settings, than its plan was made for."""
    planned = read_json(run.plan_complete) or {}
    return bool(planned.get(PLAN_HASH, record.plan_hash) != record.plan_hash)


class PlanView:
    """The plan of a run, up to date as of the last `refresh`."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self.shards: dict[int, ShardInfo] = {}
        self.committed: set[int] = set()
        self.complete: dict[str, Any] | None = None  # the totals in plan/complete.json
        self._windows: dict[int, PlannedCounts] = {}

    def refresh(self) -> None:
        """Read the files again. Raises RunError when a planning file is damaged."""
        self.complete = self.complete or read_json(self._run.plan_complete)
        if self.complete is None or len(self.shards) < self.complete["shards"]:
            for shard in sorted(self._run.planned_shards() - self.shards.keys()):
                self.shards[shard] = read_shard_info(self._run.shard(shard))
        self.committed = self._run.committed_shards()
        while (marker := read_json(self._run.window(len(self._windows)))) is not None:
            self._windows[len(self._windows)] = PlannedCounts(marker["rows"], sum(marker.get("errors", {}).values()))

    def sees_committed(self, shard: int) -> bool:
        """Whether the part of a planned shard is there by now: a look at one file."""
        return shard in self.committed or self._run.part(shard, self.shards[shard].folder).exists()

    @property
    def open_shards(self) -> list[int]:
        """Planned and not committed, in plan order."""
        return sorted(self.shards.keys() - self.committed)

    @property
    def finished(self) -> bool:
        """Whether the plan is complete and every shard of it is committed."""
        return self.complete is not None and len(self.committed) >= self.complete["shards"]

    @property
    def duplicate_ids(self) -> int:
        """Rows whose id an earlier row has; 0 while the plan is not complete."""
        return int(((self.complete or {}).get("duplicate_ids") or {}).get("count", 0))

    @property
    def planned(self) -> PlannedCounts:
        """Of the windows that are planned by now."""
        windows = self._windows.values()
        return PlannedCounts(sum(window.rows for window in windows), sum(window.errors for window in windows))
