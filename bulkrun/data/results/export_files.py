"""Results as files of other formats: JSON lines or CSV, written batch by batch to a binary stream.

Times that Python does not have (nanoseconds, years beyond 9999) are text. Knows formats; knows no runs and no names of
files.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import math
from collections.abc import Iterable, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from functools import partial
from typing import IO, Any, Protocol

import pyarrow as pa

from bulkrun.data.inputs.python_rows import NOT_IN_PYTHON, short_floats

_FORMULA_STARTS = ("=", "+", "-", "@")
_TICKS_A_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


class RowSink(Protocol):
    """Where rows go; all tables have one schema."""

    def write(self, table: pa.Table) -> None: ...


class JsonlSink:
    """One JSON object a line: nested values as they are, dates as ISO text, bytes as base64, NaN as null."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def write(self, table: pa.Table) -> None:
        self._stream.writelines(json_line(row) for row in readable_rows(table))


class CsvSink:
    """CSV with a header; nested values are JSON text, null is an empty cell, and no text is a formula."""

    def __init__(self, stream: IO[bytes], schema: pa.Schema) -> None:
        self._stream = stream
        self._write_rows([schema.names])

    def write(self, table: pa.Table) -> None:
        self._write_rows([csv_cell(value) for value in row.values()] for row in readable_rows(table))

    def _write_rows(self, rows: Iterable[Iterable[Any]]) -> None:
        text = io.StringIO()
        csv.writer(text).writerows(rows)
        self._stream.write(text.getvalue().encode())


def readable_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Each row as column -> value; a time that Python does not have is text, a duration its seconds.

    An interval of months, days and time is ISO text: P1M2DT3.5S. A float32 is its shortest decimal.
    """
    table = pa.table([short_floats(column) for column in table.columns], names=table.column_names)
    try:
        rows: list[dict[str, Any]] = table.to_pylist()
        has_intervals = any("month_day_nano" in str(field.type) for field in table.schema)
        return [_with_interval_texts(row) for row in rows] if has_intervals else rows
    except NOT_IN_PYTHON:
        columns = [[_readable(value) for value in column] for column in table.columns]
        return [dict(zip(table.column_names, values, strict=True)) for values in zip(*columns, strict=True)]


def _with_interval_texts(value: Any) -> Any:
    if isinstance(value, pa.MonthDayNano):
        seconds = Decimal(value.nanoseconds).scaleb(-9).normalize()
        parts = [f"{value.months}M" if value.months else "", f"{value.days}D" if value.days else ""]
        date_part = "".join(parts)
        return f"P{date_part}T{seconds:f}S" if seconds or not date_part else f"P{date_part}"
    if isinstance(value, dict):
        return {key: _with_interval_texts(inner) for key, inner in value.items()}
    if isinstance(value, tuple):  # an entry of a map
        return tuple(map(_with_interval_texts, value))
    return [_with_interval_texts(inner) for inner in value] if isinstance(value, list) else value


def _readable(value: pa.Scalar) -> Any:
    try:
        return _with_interval_texts(value.as_py())
    except NOT_IN_PYTHON:
        if isinstance(value, pa.StructScalar):
            return {name: _readable(inner) for name, inner in value.items()}
        if isinstance(value, pa.MapScalar):
            return [tuple(map(_readable, pair)) for pair in zip(*value.values.flatten(), strict=True)]
        if isinstance(value, pa.ListScalar):
            return [_readable(inner) for inner in value.values]
        return _time_text(value)


def _time_text(value: pa.Scalar) -> str | float:
    if pa.types.is_duration(value.type):
        return float(value.value) / _TICKS_A_SECOND[value.type.unit]
    if getattr(value.type, "unit", None) != "ns" and abs(value.value) == _infinity(value.type):
        return "infinity" if value.value > 0 else "-infinity"
    try:
        text: str = value.cast(pa.string()).as_py()
    except pa.ArrowInvalid:  # in a time zone that nobody knows
        text = value.cast(pa.int64()).cast(pa.timestamp(value.type.unit)).cast(pa.string()).as_py() + "Z"
    is_date = pa.types.is_timestamp(value.type) and not text.startswith("<")  # else in Arrow's words: out of range
    return text.replace(" ", "T", 1) if is_date else text


def _infinity(type_: pa.DataType) -> int:
    """The number that PostgreSQL and DuckDB have for infinity in dates and timestamps; of nanoseconds it is a time."""
    return int(2 ** (type_.bit_width - 1)) - 1


def json_line(row: Mapping[str, Any]) -> bytes:
    """An object as a line of JSON (UTF-8); half a surrogate pair, which UTF-8 has not, is its escape."""
    return json_text(row).encode(errors="backslashreplace") + b"\n"


def json_text(value: Any, *, ascii_only: bool = False) -> str:
    """A value as JSON: dates as ISO text, bytes as base64, NaN and infinities as null."""
    write = partial(json.dumps, ensure_ascii=ascii_only, allow_nan=False, default=_json_value)
    try:
        return write(value)
    except ValueError:
        return write(_without_nan(value))


def csv_cell(value: Any) -> Any:
    """A value as a cell. A spreadsheet takes text that starts with = + - @ for a formula; a quote makes it text."""
    if isinstance(value, dict | list):
        value = json_text(value)
    elif isinstance(value, bytes | date | time | timedelta):
        value = _json_value(value)
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA_STARTS) else value


def _json_value(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, timedelta):
        return value.total_seconds()
    return value.isoformat() if isinstance(value, date | time) else str(value)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
