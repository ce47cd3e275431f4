"""Columns that are in folders' names alone: `lang=en/x.parquet`, as Hive, Spark and bulkrun's own partitions have them.

Their values are text, whatever they look like (CAST them in `input.sql`, where DuckDB guesses their types). A column
that a file has itself is the file's. Knows no format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa

from bulkrun.data.inputs.batch import InputBatch, Position, Source, record_batch
from bulkrun.data.inputs.files import InputFile
from bulkrun.data.storage.partitions import folder_values

Values = Mapping[str, str | None]


class FolderColumns:
    """The rows of `source` with `columns`, of which some are in `values`, which has those of each file's folders."""

    def __init__(self, source: Source, values: Sequence[Values], columns: Sequence[str]) -> None:
        own = set(source.schema.names)
        self._source = source.select([name for name in columns if name in own])
        self._values = values
        fields = [source.schema.field(name) if name in own else pa.field(name, pa.string()) for name in columns]
        self.schema = pa.schema(fields)

    @property
    def num_rows(self) -> int | None:
        return self._source.num_rows

    @property
    def undeclared_columns(self) -> dict[str, int]:
        return self._source.undeclared_columns

    def select(self, columns: Sequence[str]) -> FolderColumns:
        return FolderColumns(self._source, self._values, columns)

    def batches(self, start: Position) -> Iterator[InputBatch]:
        for batch in self._source.batches(start):
            yield replace(batch, rows=self._with_folders(batch, self._values[start.file]))

    def _with_folders(self, batch: InputBatch, values: Values) -> pa.RecordBatch:
        num_rows, own = batch.rows.num_rows, set(batch.rows.schema.names)
        arrays = []
        for name in self.schema.names:
            if name in own:
                arrays.append(batch.rows.column(name))
            else:  # a row that cannot be read is null in every column
                texts = [None if row in batch.errors else values.get(name) for row in range(num_rows)]
                arrays.append(pa.array(texts, pa.string()))
        return record_batch(arrays, self.schema, num_rows)


def with_folder_columns(source: Source, files: Sequence[InputFile]) -> Source:
    """`source`, and behind its columns those that only the folders of its files have."""
    values = [folder_values(file.folders) for file in files]
    own = source.schema.names
    columns = list(dict.fromkeys([*own, *(name for folder in values for name in folder)]))
    return FolderColumns(source, values, columns) if len(columns) > len(own) else source
