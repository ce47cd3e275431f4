"""`run.max_error_rate`: when a job is hopeless. Counts rows, knows nothing of what failed.

Two shares are joined: the rows that the plan found unable to run (known of whole windows, because a shard may hold
nothing else) and the failures among the last 1000 rows that ran.
"""

from __future__ import annotations

from collections import deque

from bulkrun.data.storage.durable import read_json, replace_json
from bulkrun.errors import ErrorRateExceeded
from bulkrun.job.plan.plan_view import PlannedCounts
from bulkrun.job.store.fingerprint import fingerprint
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import RunRecord

WINDOW_ROWS = 1000
MIN_ROWS = 100  # fewer say nothing about a job


class ErrorRate:
    """The share of rows that fail; more than `limit` is too large."""

    def __init__(self, run: RunDir, record: RunRecord, limit: float) -> None:
        self._run, self._limit = run, limit
        self._settings = fingerprint([record.job["engine"], record.job["run"]["row_timeout"], record.versions])
        self._ran: deque[bool] = deque(maxlen=WINDOW_ROWS)
        before = read_json(run.given_up) or {}
        if before.get("settings") == self._settings:
            self.ran(before["rows"] - before["failed"], failed=False)
            self.ran(before["failed"], failed=True)

    def ran(self, rows: int, *, failed: bool) -> None:
        """Rows that a generation answered."""
        self._ran.extend([failed] * min(rows, WINDOW_ROWS))

    def check(self, planned: PlannedCounts) -> None:
        """Raise ErrorRateExceeded when too large a share of the rows fails. Asked while rows are left."""
        refused = planned.errors / planned.rows if planned.rows >= MIN_ROWS else 0.0
        failing = sum(self._ran) / len(self._ran) if len(self._ran) >= MIN_ROWS else 0.0
        rate = refused + (1 - refused) * failing
        if rate > self._limit:
            document = {"settings": self._settings, "rows": len(self._ran), "failed": sum(self._ran)}
            replace_json(self._run.given_up, document)
            raise ErrorRateExceeded(
                f"{rate:.0%} of the rows fail ({refused:.0%} cannot run at all, {failing:.0%} of the last "
                f"{len(self._ran)} that ran), more than run.max_error_rate = {self._limit:g}; finished rows are "
                "saved: see `bulkrun errors`, fix the job or raise the limit, then run the same command again"
            )
