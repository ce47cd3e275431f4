"""`run.max_error_rate`: when a job is hopeless. Counts rows, knows nothing of what failed.

Two shares are joined: the rows that the plan found unable to run (known of whole windows, because a shard may hold
nothing else) and the failures among the last 1000 rows that ran.
"""

from __future__ import annotations

from collections import deque

from bulkrun.errors import ErrorRateExceeded
from bulkrun.job.plan.plan_view import PlannedCounts

WINDOW_ROWS = 1000
MIN_ROWS = 100  # fewer say nothing about a job


class ErrorRate:
    """The share of rows that fail."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._ran: deque[bool] = deque(maxlen=WINDOW_ROWS)

    def ran(self, rows: int, *, failed: bool) -> None:
        """Rows that a generation answered."""
        self._ran.extend([failed] * min(rows, WINDOW_ROWS))

    def check(self, planned: PlannedCounts) -> None:
        """Raise ErrorRateExceeded when too large a share of the rows fails."""
        refused = planned.errors / planned.rows if planned.rows >= MIN_ROWS else 0.0
        failing = sum(self._ran) / len(self._ran) if len(self._ran) >= MIN_ROWS else 0.0
        rate = refused + (1 - refused) * failing
        if rate > self._limit:
            raise ErrorRateExceeded(
                f"{rate:.0%} of the rows fail ({refused:.0%} cannot run at all, {failing:.0%} of the last "
                f"{len(self._ran)} that ran), more than run.max_error_rate = {self._limit:g}; finished rows are "
                "saved: see `bulkrun errors`, mend the job or raise the limit, then run the same command again"
            )
