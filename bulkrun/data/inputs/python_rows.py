"""Arrow rows as Python values, for prompts and whoever else looks into them.

Arrow's times reach further than Python's: to nanoseconds, far beyond the year 9999, into time zones that this machine
does not know. Nanoseconds are cut to microseconds; any other value that Python cannot hold is its row's error. Bytes
are text where somebody wants text of them.
"""

from __future__ import annotations

from typing import Any, TypeVar

import pyarrow as pa

from bulkrun.data.inputs.batch import record_batch
from bulkrun.data.types.casts import cast_each
from bulkrun.data.types.nested import with_leaves
from bulkrun.request import RowError

# What pyarrow raises for a value that Python cannot hold: out of range, or (an ArrowInvalid) in an unknown time zone.
NOT_IN_PYTHON = (ValueError, OverflowError, KeyError)


_Column = TypeVar("_Column", pa.Array, pa.ChunkedArray)


def python_rows(rows: pa.RecordBatch) -> tuple[list[dict[str, Any]], dict[int, RowError]]:
    """Each row as column -> value, and why rows could not be read whole: what is unreadable in them is null."""
    rows = _in_microseconds(rows)
    try:
        return rows.to_pylist(), {}
    except NOT_IN_PYTHON:
        return _value_by_value(rows)


def with_text(rows: pa.RecordBatch) -> tuple[pa.RecordBatch, dict[int, RowError]]:
    """The rows with UTF-8 text for bytes (many writers mark no text as text), null and an error where they are none."""
    columns, errors = [], dict[int, RowError]()
    for name, column in zip(rows.schema.names, rows.columns, strict=True):
        texts, misfits = cast_each(column, with_leaves(column.type, _text_of_bytes))
        why = f"column {name!r}: bytes that are not UTF-8 text; make text of them in input.sql (hex, base64)"
        errors = dict.fromkeys(misfits, RowError("bad_input", why)) | errors
        columns.append(texts)
    types = [column.type for column in columns]
    schema = pa.schema([field.with_type(type_) for field, type_ in zip(rows.schema, types, strict=True)])
    return record_batch(columns, schema, rows.num_rows), errors


def with_short_floats(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The rows with float64 for float32, of the same shortest decimals: 0.1, and not the 0.10000000149011612 it is."""
    columns = [short_floats(column) for column in rows.columns]
    schema = pa.schema([field.with_type(column.type) for field, column in zip(rows.schema, columns, strict=True)])
    return record_batch(columns, schema, rows.num_rows)


def short_floats(column: _Column) -> _Column:
    """`with_short_floats` of one column."""
    wanted = with_leaves(column.type, _float64_of_float32)
    if wanted == with_leaves(column.type, lambda leaf: leaf):
        return column
    texts = with_leaves(column.type, lambda leaf: pa.string() if leaf == pa.float32() else leaf)
    try:
        return column.cast(texts).cast(wanted)
    except pa.ArrowNotImplementedError:  # beside them lies what Arrow cannot cast, not even into itself
        return column


def _float64_of_float32(type_: pa.DataType) -> pa.DataType:
    return pa.float64() if type_ == pa.float32() else type_


def _text_of_bytes(type_: pa.DataType) -> pa.DataType:
    is_bytes = pa.types.is_binary(type_) or pa.types.is_large_binary(type_) or pa.types.is_fixed_size_binary(type_)
    return pa.string() if is_bytes else type_


def without_nulls(value: Any) -> Any:
    """A value without the null fields of its structs: Arrow gives all rows the fields of all."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _value_by_value(rows: pa.RecordBatch) -> tuple[list[dict[str, Any]], dict[int, RowError]]:
    read: list[dict[str, Any]] = [{} for _ in range(rows.num_rows)]
    errors: dict[int, RowError] = {}
    for name, column in zip(rows.schema.names, rows.columns, strict=True):
        for index, value in enumerate(column):
            try:
                read[index][name] = value.as_py()
            except NOT_IN_PYTHON:
                read[index][name] = None
                errors.setdefault(index, RowError("bad_input", _why(name, column.type)))
    return read, dict(sorted(errors.items()))


def _why(name: str, type_: pa.DataType) -> str:
    return (
        f"column {name!r}: a {type_} that cannot be read: out of range (years 1 to 9999), or in a time zone that this "
        "machine does not know; CAST it in input.sql"
    )


def _in_microseconds(rows: pa.RecordBatch) -> pa.RecordBatch:
    fields = [field.with_type(with_leaves(field.type, _microseconds)) for field in rows.schema]
    if all(field.type == own.type for field, own in zip(fields, rows.schema, strict=True)):
        return rows
    import pyarrow.compute as pc  # a tenth of the start of a query, and asked of few

    cuts = [pc.CastOptions(field.type, allow_time_truncate=True) for field in fields]
    columns = [pc.cast(column, options=cut) for column, cut in zip(rows.columns, cuts, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


def _microseconds(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(type_) and type_.unit == "ns":
        return pa.timestamp("us", type_.tz)
    return {pa.duration("ns"): pa.duration("us"), pa.time64("ns"): pa.time64("us")}.get(type_, type_)
