"""Values of a night's input in the columns of the results that are there: a value that has no place is its row's error.

Types may differ where one holds the other's values as a rule (`compatibility`): whole numbers go into a column of
doubles up to 2**53, microseconds into one of nanoseconds up to the year 2262. What is beyond is found before the rows
are compared and run; a value that came by another way becomes null when it is merged, and its row says so. Knows no
files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa

from bulkrun.data.inputs.batch import InputBatch, Position, Source, record_batch
from bulkrun.data.inputs.reader import Dataset
from bulkrun.request import RowError

Types = Mapping[str, pa.DataType]
Unfit = dict[int, str]  # place of a value -> why it does not fit


def fit_dataset(dataset: Dataset, columns: Sequence[str], there: pa.Schema) -> Dataset:
    """The input with an error in each row whose value of one of `columns` does not fit into that of `there`."""
    names = [name for name in columns if name in there.names and name in dataset.schema.names]
    types = {name: there.field(name).type for name in names}
    other = {name: kind for name, kind in types.items() if dataset.schema.field(name).type != kind}
    return replace(dataset, source=_Fitting(dataset.source, other)) if other else dataset


class _Fitting:
    """A `Source` whose rows fit into columns of `types`: they keep their own types, as prompts are made of them."""

    def __init__(self, source: Source, types: Types) -> None:
        self._source = source
        self._types = types

    @property
    def schema(self) -> pa.Schema:
        return self._source.schema

    @property
    def num_rows(self) -> int | None:
        return self._source.num_rows

    @property
    def undeclared_columns(self) -> dict[str, int]:
        return self._source.undeclared_columns

    def select(self, columns: Sequence[str]) -> _Fitting:
        types = {name: kind for name, kind in self._types.items() if name in columns}
        return _Fitting(self._source.select(columns), types)

    def batches(self, start: Position) -> Iterator[InputBatch]:
        for batch in self._source.batches(start):
            yield self._fitted(batch)

    def _fitted(self, batch: InputBatch) -> InputBatch:
        """Only the value itself is taken out: the row keeps its id."""
        arrays, errors = list(batch.rows.columns), dict(batch.errors)
        for name, kind in self._types.items():
            if unfit := find_unfit(batch.rows.column(name), kind):
                arrays[batch.rows.schema.get_field_index(name)] = without(batch.rows.column(name), unfit)
                errors = {place: _error(name, kind, why) for place, why in unfit.items()} | errors
        rows = record_batch(arrays, batch.rows.schema, batch.rows.num_rows)
        return replace(batch, rows=rows, errors=dict(sorted(errors.items())))


def fit_table(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Result rows with the columns of `schema`. A value that does not fit is null, and its row has an error."""
    columns = [table[name] for name in schema.names]
    errors: dict[int, RowError] = {}
    for index, field in enumerate(schema):
        if columns[index].type != field.type:
            unfit = find_unfit(columns[index], field.type)
            errors = {place: _error(field.name, field.type, why) for place, why in unfit.items()} | errors
            columns[index] = without(columns[index], unfit).cast(field.type)
    return _with_errors(pa.Table.from_arrays(columns, schema=schema), errors)


def _with_errors(table: pa.Table, errors: Mapping[int, RowError]) -> pa.Table:
    """With errors in rows that have none yet; the response stays beside them."""
    codes, messages = table["error_code"].to_pylist(), table["error_message"].to_pylist()
    for place, error in errors.items():
        if codes[place] is None:
            codes[place], messages[place] = error.code, error.message
    for name, values in (("error_code", codes), ("error_message", messages)) if errors else ():
        table = table.set_column(table.schema.get_field_index(name), name, pa.array(values, pa.string()))
    return table


def find_unfit(values: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> Unfit:
    """Where the values are that `kind` cannot hold exactly."""
    try:
        values.cast(kind)
    except pa.ArrowInvalid:
        # Without what lies outside a slice: lists are cast with all that their array holds.
        return _search(without(values, {}), kind)
    return {}


def _search(values: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> Unfit:
    """Arrow tells the first value alone, so halves are tried."""
    try:
        values.cast(kind)
        return {}
    except pa.ArrowInvalid as problem:
        if len(values) == 1:
            return {0: str(problem)}
    half = len(values) // 2
    first, second = (values.take(pa.array(places)) for places in (range(half), range(half, len(values))))
    return _search(first, kind) | {half + place: why for place, why in _search(second, kind).items()}


def without(values: pa.Array | pa.ChunkedArray, unfit: Unfit) -> pa.Array | pa.ChunkedArray:
    """The values with nulls in these places."""
    return values.take(pa.array([None if place in unfit else place for place in range(len(values))], pa.int64()))


def _error(column: str, kind: pa.DataType, why: str) -> RowError:
    return RowError(
        "bad_input",
        f"column {column!r}: {why}; the column of the results is {kind}: cast it in input.sql, or start over with "
        "--fresh",
    )
