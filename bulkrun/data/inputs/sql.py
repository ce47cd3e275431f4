"""`input.sql`: a SELECT over the input files whose result is written once and is the input from then on.

DuckDB promises no order from one run of a query to the next, so the result is fixed in a snapshot (Parquet with page
checksums) that appears whole or not at all and is never made twice. Text files go through the project's own readers
first, so that the query sees declared columns; a line that cannot be read cannot be selected either, and comes as an
error row after the query's rows, so that no line vanishes. Parquet files are read by DuckDB itself, which does not
look at their page checksums; those that differ in types go through the readers too, as DuckDB would round values, and
so do those with a column that is in a folder's name as well, as DuckDB would show the folder's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import IO, NamedTuple

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from bulkrun.data.inputs.batch import MAX_BATCH_ROWS, InputBatch, Position, Source
from bulkrun.data.inputs.files import InputFile
from bulkrun.data.inputs.parquet import ParquetSource
from bulkrun.data.inputs.sql_columns import in_files_too, refused_columns
from bulkrun.data.inputs.unite import plain_type
from bulkrun.data.storage.durable import disk_errors, new_file, publish_new
from bulkrun.data.storage.remote import RemotePath
from bulkrun.data.tables.duck import (
    NotASelect,
    changed_by_arrow,
    folders_in,
    interruptible,
    locked_connection,
    single_select,
    view_of_parquet,
)
from bulkrun.data.tables.row_groups import RowGroupWriter
from bulkrun.errors import InputError
from bulkrun.request import RowError
from bulkrun.scratch import Scratch

_CODE, _MESSAGE = "bulkrun.error_code", "bulkrun.error_message"
_ERROR_SCHEMA = pa.schema([(_CODE, pa.string()), (_MESSAGE, pa.string())])
_ERRORS = "errors.tmp"
_HOW_TO_JOIN = (
    "a query reads the files of input.path alone: to join two Parquet files, list both there and name both in the SQL "
    "(FROM 'docs.parquet' d JOIN 'authors.parquet' a ON ...; `input` is all of them together)"
)
_NAMES_INPUT = re.compile(r"\binput\b", re.IGNORECASE)  # a join may name the files alone
_ROWS_PER_GROUP = 16 * MAX_BATCH_ROWS


class SnapshotSource:
    """The rows of a snapshot; what its two error columns hold becomes errors again."""

    undeclared_columns: dict[str, int]

    def __init__(self, snapshot: Source) -> None:
        self._snapshot = snapshot
        self.undeclared_columns = {}
        self.schema = pa.schema([field for field in snapshot.schema if field.name not in _ERROR_SCHEMA.names])

    @classmethod
    def open(cls, path: Path, max_row_bytes: int) -> SnapshotSource:
        """The snapshot at `path`, which `write_snapshot` made."""
        stat = path.stat()
        return cls(
            ParquetSource.open([InputFile(path, "parquet", None, stat.st_size, stat.st_mtime_ns)], max_row_bytes)
        )

    @property
    def num_rows(self) -> int | None:
        return self._snapshot.num_rows

    def select(self, columns: Sequence[str]) -> SnapshotSource:
        return SnapshotSource(self._snapshot.select([*columns, *_ERROR_SCHEMA.names]))

    def batches(self, start: Position) -> Iterator[InputBatch]:
        for batch in self._snapshot.batches(start):
            codes, messages = (batch.rows.column(name).to_pylist() for name in _ERROR_SCHEMA.names)
            unreadable = {
                index: RowError(code, message)
                for index, (code, message) in enumerate(zip(codes, messages, strict=True))
                if code is not None
            }
            rows = batch.rows.select(self.schema.names)
            yield InputBatch(batch.position, rows, unreadable | batch.errors)


class Given(NamedTuple):
    """What a query is about: the files, the columns that each has itself, and their rows as the readers give them.

    `mixed`: a column's types differ.
    """

    files: Sequence[InputFile]
    columns: Sequence[Collection[str]]
    rows: Iterable[InputBatch]
    schema: pa.Schema
    mixed: bool


def write_snapshot(given: Given, sql: str, path: Path) -> None:
    """Run `sql` over the given files and publish the result at `path` unless one is there.

    Raises InputError with DuckDB's message for a query that cannot run, RunError where the result cannot be written.
    """
    temporary = path.parent / "tmp"
    otherwise = "check the disk, then run the same command again"
    with disk_errors("writing the rows of input.sql", path, otherwise):
        temporary.mkdir(parents=True, exist_ok=True)
        _write_snapshot(given, sql, path, temporary)


def _write_snapshot(given: Given, sql: str, path: Path, temporary: Path) -> None:
    with Scratch(temporary) as folder:
        is_parquet = given.files[0].format == "parquet"
        named: list[str | Path] = [_for_duckdb(file) for file in given.files] if is_parquet else []
        tables, view = _input_view(given, sql, named, folder)
        objects = [file.path for file in given.files if isinstance(file.path, RemotePath)]
        _write_result(sql, tables, named, view, folder, objects)
        publish_new(folder / "result.tmp", path)  # unless another process has: then theirs is the snapshot


def _input_view(
    given: Given, sql: str, named: list[str | Path], folder: Path
) -> tuple[list[str | Path], Callable[..., None]]:
    """The files behind `input`, and how it shows them: those `named`, or where DuckDB would misread them, our own."""
    own = in_files_too(named, given.columns)
    folders = dict.fromkeys(folders_in(named[0]) - own if named else ())
    only_own = not folders and all(own <= set(columns) for columns in given.columns)  # then no folder need be looked at
    misread = given.mixed or (own and not only_own)
    read_here = not named or bool(misread and _NAMES_INPUT.search(sql))
    tables = _rewritten(given, folder, own) if read_here else named
    refused = refused_columns(given.schema, [given.schema.names] if read_here else given.columns)
    # Rewritten files lie in the run's directory, and how that is called makes no columns.
    shown = folders if read_here or own else None
    return tables, partial(view_of_parquet, folder_columns=shown, refused=refused)


def _for_duckdb(file: InputFile) -> str | Path:
    return file.path.absolute() if isinstance(file.path, Path) else file.path.url


def _rewritten(given: Given, folder: Path, own: Collection[str]) -> list[str | Path]:
    """Parquet files in `folder` of the rows that can be read; the errors of the others are in its errors.tmp."""
    if not given.schema.names:
        raise InputError("input.sql: the input has no readable rows, so `input` has no columns to select")
    places = [_place(file, folder, number, own) for number, file in enumerate(given.files)]
    batches = groupby(given.rows, lambda batch: places[batch.position.file])
    written: list[str | Path] = []
    with _writer(folder / _ERRORS, _ERROR_SCHEMA) as errors:
        for place, rows in batches:
            written.append(place)
            _write_readable(rows, given.schema, place, errors)
        if not written:
            written.append(places[0])
            _write_readable([], given.schema, places[0], errors)
    return written


def _place(file: InputFile, folder: Path, number: int, own: Collection[str]) -> Path:
    """A file for the rows of `file`: those of Parquet in folders like its own, whose names are columns to DuckDB.

    Not those that are columns of the files' `own`.
    """
    if file.format != "parquet":
        return folder / "input.tmp"
    folders = Path(_for_duckdb(file)).parent.parts
    named = [part for part in folders if "=" in part and part.partition("=")[0] not in own]
    return folder.joinpath("input", *named, f"{number}.tmp")


def _write_readable(batches: Iterable[InputBatch], schema: pa.Schema, path: Path, errors: RowGroupWriter) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with _writer(path, schema) as rows:
        for batch in batches:
            good = [index for index in range(batch.rows.num_rows) if index not in batch.errors]
            rows.write(batch.rows.take(pa.array(good, pa.int64())))
            if batch.errors:
                columns = zip(*batch.errors.values(), strict=True)
                errors.write(
                    pa.RecordBatch.from_arrays([pa.array(c, pa.string()) for c in columns], schema=_ERROR_SCHEMA)
                )


def _write_result(
    sql: str,
    tables: Sequence[str | Path],
    named: Sequence[str | Path],
    make_view: Callable[..., None],
    folder: Path,
    objects: Sequence[RemotePath],
) -> None:
    """Write the query's rows, then the rows that could not be read, to result.tmp in `folder`.

    `tables` are the view `input`, which `make_view` makes, `named` what the query may read by name.
    """
    connection = locked_connection(
        files=list(dict.fromkeys([*tables, *named])),
        spill=folder / "spill",
        objects=objects[0].files if objects else None,
    )
    try:
        interruptible(connection, lambda: make_view(connection, "input", tables, union_by_name=True))
        relation = connection.sql(single_select(connection, sql))
        for name, kind in zip(relation.columns, relation.types, strict=True):
            if changed_by_arrow(kind):
                raise _no_such_type(name, kind)
        result = interruptible(connection, lambda: relation.to_arrow_reader(MAX_BATCH_ROWS))
        _write_batches(chain(_batches(connection, result), _errors_in(folder)), result.schema, folder / "result.tmp")
        for path in objects:
            path.check_unchanged()
    except duckdb.PermissionException as error:
        raise InputError(f"input.sql: {error}; {_HOW_TO_JOIN}") from error
    except (duckdb.Error, NotASelect) as error:
        raise InputError(f"input.sql: {error}") from error
    finally:
        connection.close()


def _write_batches(batches: Iterable[pa.RecordBatch], result: pa.Schema, path: Path) -> None:
    schema = _snapshot_schema(result)
    with new_file(path) as file, _writer(file, schema) as writer:
        for batch in batches:
            writer.write(_fill(batch, schema))


def _errors_in(folder: Path) -> Iterator[pa.RecordBatch]:
    """The rows that could not be read; none where DuckDB read the files."""
    if (errors := folder / _ERRORS).exists():
        yield from pq.ParquetFile(errors).iter_batches(MAX_BATCH_ROWS)


def _batches(connection: duckdb.DuckDBPyConnection, result: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
    """The query's batches. Arrow reports a row that the query fails on as an OSError, although no disk failed."""
    while True:
        try:
            batch = interruptible(connection, result.read_next_batch)
        except StopIteration:
            return
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"input.sql: {error}") from error
        yield batch


def _snapshot_schema(result: pa.Schema) -> pa.Schema:
    if len(set(result.names)) < len(result.names):
        twice = next(name for name in result.names if result.names.count(name) > 1)
        raise InputError(f"input.sql: two columns of the result are named {twice!r}; rename one with AS")
    fields = [pa.field(field.name, plain_type(field.type)) for field in result]
    for field in fields:
        _check_type(field)
    return pa.schema([*fields, *_ERROR_SCHEMA])


def _check_type(field: pa.Field) -> None:
    """Raise InputError for a column whose type Parquet does not have. Only its writer knows, and names no column."""
    try:
        pq.ParquetWriter(pa.BufferOutputStream(), pa.schema([field])).close()
    except pa.ArrowNotImplementedError as error:
        raise _no_such_type(field.name, field.type) from error


def _no_such_type(column: str, kind: object) -> InputError:
    return InputError(f"input.sql: column {column!r} has a type that Parquet does not have ({kind}); cast it")


def _fill(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """`batch` in `schema`, null where it has no such column."""
    present = set(batch.schema.names)
    arrays = [
        batch.column(field.name).cast(field.type) if field.name in present else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _writer(path: Path | IO[bytes], schema: pa.Schema) -> RowGroupWriter:
    return RowGroupWriter(path, schema, _ROWS_PER_GROUP)
