"""Some rows of an input, each as likely as any other, however many there are: kept while the input streams by."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


class RowSample:
    """The rows with the `size` smallest of random numbers, one for each row that can run; the same each time."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._random = np.random.default_rng(0)
        self._kept: list[tuple[float, dict[str, Any]]] = []
        self._bound = 1.0  # rows with larger numbers are not among the smallest any more

    def add(self, batch: pa.RecordBatch) -> None:
        """Take from a batch of rows of a shard (`shard_schema`) those that may be in the sample."""
        rows = batch.filter(pc.is_null(batch.column("error_code")))
        numbers = self._random.random(rows.num_rows)
        chosen = np.flatnonzero(numbers < self._bound)
        taken = rows.select(["row", "row_id", "token_ids", "overrides"]).take(pa.array(chosen)).to_pylist()
        self._kept += zip(numbers[chosen].tolist(), taken, strict=True)
        if len(self._kept) > 2 * self._size:
            self._cut()

    def rows(self) -> list[dict[str, Any]]:
        """The sample, in random order."""
        self._cut()
        return [row for _, row in self._kept]

    def _cut(self) -> None:
        self._kept = sorted(self._kept, key=lambda one: one[0])[: self._size]
        if len(self._kept) == self._size:
            self._bound = self._kept[-1][0]
