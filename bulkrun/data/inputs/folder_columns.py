"""Columns that are in folders' names alone: `lang=en/x.parquet`, as Hive, Spark and bulkrun's own partitions have them.

Their values are text, whatever they look like (CAST them in `input.sql`, where DuckDB guesses their types), or of the
type that the column has in files which have it themselves: there it is the file's. Knows no format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from bulkrun.data.inputs.batch import FileSource, InputBatch, Position, Source, record_batch
from bulkrun.data.inputs.files import InputFile
from bulkrun.data.storage.partitions import folder_values
from bulkrun.errors import InputError

Values = Mapping[str, str | None]


class FolderColumns:
    """The rows of `source` with `columns`; `values` has those that each file lacks and its folders have."""

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
        for field in self.schema:
            column = batch.rows.column(field.name) if field.name in own else pa.nulls(num_rows, field.type)
            if values.get(field.name) is not None:
                # A row that cannot be read is null in every column; a line may have what the sample did not show.
                texts = [None if row in batch.errors else values[field.name] for row in range(num_rows)]
                column = pc.if_else(column.is_null(), pa.array(texts, pa.string()).cast(field.type), column)
            arrays.append(column)
        return record_batch(arrays, self.schema, num_rows)


def with_folder_columns(source: FileSource, files: Sequence[InputFile]) -> Source:
    """`source`, and behind its columns those that only the folders of its files have.

    Raises InputError where a folder's value cannot be of the type that the column has in other files.
    """
    values = [_lacking(source, number, file) for number, file in enumerate(files)]
    columns = list(dict.fromkeys([*source.schema.names, *(name for folder in values for name in folder)]))
    return FolderColumns(source, values, columns) if any(values) else source


def _lacking(source: FileSource, number: int, file: InputFile) -> Values:
    """What the folders of a file say of columns that it has not itself."""
    named = folder_values(file.folders)
    values = {name: value for name, value in named.items() if name not in source.own_columns(number)}
    for name in values.keys() & set(source.schema.names):
        _check_type(file, name, values[name], source.schema.field(name).type)
    return values


def _check_type(file: InputFile, name: str, value: str | None, kind: pa.DataType) -> None:
    try:
        pa.scalar(value, pa.string()).cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise InputError(
            f"{file.path}: has no column {name!r}, and its folder's value {value!r} is not {kind}, the column's type "
            "in other files; rename the folder, or write the column into this file too"
        ) from None
