"""The rows' own priorities (`input.priority`): smaller runs first. Knows one column; knows no order and no shards."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from bulkrun.data.inputs.python_rows import python_rows
from bulkrun.errors import JobFileError
from bulkrun.job.plan.index import I64
from bulkrun.job.prompts.templates import unknown_column
from bulkrun.request import RowError

_LARGEST = 2**31 - 1
_INTEGER = re.compile(r"\s*([-+]?[0-9]{1,20})(\.0*)?\s*", re.ASCII)


class RowPriorities(NamedTuple):
    """A priority per row of a batch; `errors`: rows whose value is none, by their place in the batch."""

    values: I64
    errors: dict[int, RowError]


class Priorities:
    """Reads the column of one job. Raises JobFileError where the input does not have it."""

    def __init__(self, column: str | None, columns: Sequence[str]) -> None:
        if column is not None and column not in columns:
            raise JobFileError([f"input.priority: {unknown_column(column, columns)}"])
        self._column = column

    def of(self, rows: pa.RecordBatch) -> RowPriorities:
        """The priority of each row; 0 where there is no column or value, and for one that is not an integer."""
        values = np.zeros(rows.num_rows, np.int64)
        if self._column is None:
            return RowPriorities(values, {})
        read, errors = python_rows(rows.select([self._column]))
        for row, value in enumerate(each[self._column] for each in read):
            if (priority := _priority(value)) is not None:
                values[row] = priority
            elif value not in (None, ""):  # CSV's cells are never null
                errors[row] = RowError(
                    "bad_input", f"input.priority: column {self._column!r} is {value!r:.60}, not a 32-bit integer"
                )
        return RowPriorities(values, errors)


def _priority(value: Any) -> int | None:
    """An integer of 32 bits. What DuckDB sums up is a decimal without places, CSV columns are text, and one null (in
    pandas) or fraction (in JSON) makes doubles of all integers of a column."""
    whole = type(value) is int or (isinstance(value, float) and value.is_integer())
    whole = whole or (isinstance(value, Decimal) and value == value.to_integral_value())
    if isinstance(value, str) and (found := _INTEGER.fullmatch(value)):
        value, whole = int(found[1]), True
    return int(value) if whole and -_LARGEST <= value <= _LARGEST else None
