"""The input as windows take it: one stream from the first to the last, so that no window reads past the ones before it.

A text file can only be read from its start, so opening it anew for every window costs time that grows with the square
of their number. Knows batches and positions; knows nothing of prompts or windows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from bulkrun.data.inputs.batch import InputBatch, Position
from bulkrun.data.inputs.reader import Dataset


class InputStream:
    """Rows of a dataset, some at a time. `all_columns`: the output is to have every column that comes."""

    def __init__(self, dataset: Dataset, all_columns: bool = True) -> None:
        self._dataset = dataset
        self._all_columns = all_columns
        self._seen = Counter[str]()
        self._next: Position | None = None  # where `_batches` goes on
        self._batches: Iterator[InputBatch] = iter(())
        self._rest: InputBatch | None = None  # of the last batch, before `_batches`

    def take(self, at: Position, rows: int) -> Iterator[InputBatch]:
        """At most `rows` rows from `at` on. Opens a file only where `at` is not the end of what was taken before."""
        if at != self._next:
            self._batches, self._rest, self._next = self._dataset.batches(at), None, at
        while rows and (batch := self._rest or next(self._batches, None)) is not None:
            self._rest = batch.slice(rows) if batch.rows.num_rows > rows else None
            batch = batch.head(rows)
            rows -= batch.rows.num_rows
            self._next = batch.next
            yield batch

    def take_undeclared(self) -> dict[str, int]:
        """Keys met since the last call that the declared columns do not have -> how often."""
        met = Counter(self._dataset.undeclared_columns)
        new, self._seen = met - self._seen, met
        inside = tuple(f"{name}." for name in self._dataset.schema.names)
        return {key: times for key, times in sorted(new.items()) if self._all_columns or key.startswith(inside)}
