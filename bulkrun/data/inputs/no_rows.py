"""An input of no rows at all: its files do not show which columns it would have, so the caller says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from bulkrun.data.inputs.batch import InputBatch, Position


class NoRows:
    """A source of no rows, with the columns that the caller expects."""

    num_rows: int | None = 0

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self.undeclared_columns: dict[str, int] = {}

    def batches(self, start: Position) -> Iterator[InputBatch]:
        return iter(())

    def select(self, columns: Sequence[str]) -> NoRows:
        return NoRows(pa.schema([self.schema.field(name) for name in columns]))
