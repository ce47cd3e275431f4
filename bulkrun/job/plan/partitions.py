"""Which partition a row belongs to: `output.partition_by` and the row's values become a folder.

A shard is one file, so the planner cuts shards inside partitions; this module says where the borders are. Knows columns
and folder names; knows nothing of order, cost or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bulkrun.data.storage.partitions import MAX_FOLDER_BYTES, duckdb_type, folder_name, is_plain_name
from bulkrun.data.types.casts import cast_each
from bulkrun.errors import JobFileError, did_you_mean
from bulkrun.job.plan.index import I64
from bulkrun.request import RowError

MAX_PARTITIONS = 10_000  # in a window: each is a folder, a shard and a file at least


class RowFolders(NamedTuple):
    """The folders of a batch: row k lies in ``folders[of_row[k]]``. `errors`: rows whose value no folder can bear."""

    folders: list[str]
    of_row: I64
    errors: dict[int, RowError]


class Partitions:
    """The partition columns of one job; `passthrough` are the columns that go to the output.

    Raises JobFileError, all problems at once, for a column that is not among them, whose type or name makes no folder.
    """

    def __init__(self, columns: Sequence[str], passthrough: pa.Schema) -> None:
        if problems := [problem for name in dict.fromkeys(columns) if (problem := _problem(name, passthrough))]:
            raise JobFileError([f"output.partition_by: {problem}" for problem in problems])
        self._columns = list(dict.fromkeys(columns))

    def of(self, rows: pa.RecordBatch) -> RowFolders:
        """The folder of each row. A value that no folder's name can bear counts as null, and is an error of its row."""
        folders, of_row, errors = [""], np.zeros(rows.num_rows, np.int64), dict[int, RowError]()
        for name in self._columns:
            values = pc.dictionary_encode(rows.column(name).cast(pa.string()), null_encoding="encode")
            texts, of_value = values.dictionary.to_pylist(), values.indices.to_numpy().astype(np.int64)
            names = [folder_name(name, text) for text in texts]
            kind = rows.column(name).type
            for value, problem in (_unreadable(name, values.dictionary, kind) | _too_long(name, names)).items():
                error = RowError("bad_input", problem)
                errors |= {int(row): error for row in np.flatnonzero(of_value == value)}
                names[value] = folder_name(name, None)
            pairs, of_row = np.unique(of_row * len(names) + of_value, return_inverse=True)
            folders = [_joined(folders[pair // len(names)], names[pair % len(names)]) for pair in pairs.tolist()]
        return RowFolders(folders, of_row, errors)


def _problem(name: str, passthrough: pa.Schema) -> str | None:
    if name not in passthrough.names:
        hint = did_you_mean(name, passthrough.names) or f"there are: {', '.join(passthrough.names) or 'none'}"
        return f"column {name!r} is not among the input columns that go to the output (input.columns); {hint}"
    kind = passthrough.field(name).type
    if duckdb_type(kind) is None:
        return f"column {name!r} is {kind}; text, integers, booleans and dates name folders: CAST it in input.sql"
    if not is_plain_name(name):
        return f"column {name!r} cannot be part of a folder's name (letters, digits, _ and -); rename it in input.sql"
    return None


def _too_long(column: str, folders: Sequence[str]) -> dict[int, str]:
    """Why values cannot be folders, by their places."""
    sizes = {value: len(folder.encode()) for value, folder in enumerate(folders)}
    return {
        value: f"output.partition_by: the value of {column!r} makes a folder name of {size} bytes, "
        f"more than the {MAX_FOLDER_BYTES} that a file system takes"
        for value, size in sizes.items()
        if size > MAX_FOLDER_BYTES
    }


def _unreadable(column: str, texts: pa.StringArray, kind: pa.DataType) -> dict[int, str]:
    """The same, for texts that are no values of the column's type again."""
    problem = (
        f"output.partition_by: the value of {column!r} is a {kind} that cannot be read back from a folder's name "
        "(years 0 to 9999); CAST it to text in input.sql"
    )
    return dict.fromkeys(cast_each(texts, kind)[1], problem)


def _joined(parent: str, name: str) -> str:
    return f"{parent}/{name}" if parent else name
