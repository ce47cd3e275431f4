"""Helpers of the reader tests: everything a dataset yields, put together."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bulkrun.data.inputs.batch import Position
from bulkrun.data.inputs.reader import START, Dataset, open_input
from bulkrun.request import RowError


def read_all(
    dataset: Dataset, start: Position = START, limit: int | None = None
) -> tuple[list[dict[str, Any]], dict[int, RowError]]:
    """All rows from `start` on, and the errors by index in that list; checks that positions follow each other."""
    rows: list[dict[str, Any]] = []
    errors: dict[int, RowError] = {}
    expected = start
    for batch in dataset.batches(start, limit=limit):
        if batch.position.file != expected.file:
            expected = Position(batch.position.file, 0)
        assert batch.position == expected
        assert batch.rows.schema.equals(dataset.schema)
        errors |= {len(rows) + index: error for index, error in batch.errors.items()}
        rows += batch.rows.to_pylist() if dataset.schema.names else [{}] * batch.rows.num_rows
        expected = batch.next
    unread = [index for index, error in errors.items() if ": column " not in error.message]  # not just one value
    assert all(value is None for index in unread for value in rows[index].values())
    return rows, errors


def read(paths: Any, **options: Any) -> tuple[list[dict[str, Any]], dict[int, RowError]]:
    """All rows and errors of an input."""
    names = [str(path) for path in paths] if isinstance(paths, list) else str(paths)
    with open_input(names, **options) as dataset:
        return read_all(dataset)


def write_lines(path: Path, rows: Iterable[dict[str, Any] | bytes]) -> Path:
    """A JSON lines file; bytes go in as they are."""
    path.write_bytes(b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in rows))
    return path
