"""Parquet: streamed in small batches, with every footer read before the first row. Knows no SQL.

A file that is torn, is not Parquet, disagrees with the others on a type, or claims to unpack to something absurd is an
InputError before anything runs. Memory is that of a batch and of the largest page (a page is the least that can be
decoded; writers put some 1000 rows into one, however big the rows are). What a batch will have in bytes nobody knows
before: a page of the same long text a thousand times is as small as one of them. So few rows are decoded at a time, and
joined to batches.
Pages are checked against their checksums where the writer left some.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bulkrun.data.inputs.batch import MAX_BATCH_BYTES, InputBatch, Position, blank_rows, joined, record_batch
from bulkrun.data.inputs.files import InputFile
from bulkrun.data.inputs.unite import differ, unite
from bulkrun.data.storage.arrow_errors import is_disk_error, refuse_shortage
from bulkrun.data.storage.remote import RemotePath
from bulkrun.data.types.casts import cast_each
from bulkrun.data.types.known_types import KnownTypes
from bulkrun.data.types.nested import is_text
from bulkrun.errors import InputError
from bulkrun.request import RowError

_BOMB_BYTES = 512 * 2**20  # a row group this big ...
_BOMB_RATIO = 500  # ... that is packed this tightly is not data
_STEP_ROWS = 32  # decoded at a time; fewer make reading slower, more make what a page can unfold to larger
_BUFFER_BYTES = 2**20
_REMOTE_BUFFER_BYTES = 8 * 2**20  # one request; of a file's columns together at most ...
_REMOTE_BUFFERS_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class _Footer:
    """What a file's footer says: the rows and uncompressed bytes of each row group, and the columns."""

    group_rows: tuple[int, ...]
    group_bytes: tuple[int, ...]
    schema: pa.Schema


class ParquetSource:
    """Rows of Parquet files; a column that a file lacks is null there."""

    def __init__(self, files: Sequence[InputFile], footers: list[_Footer], schema: pa.Schema, max_row_bytes: int):
        self._files = files
        self._footers = footers
        self._max_row_bytes = max_row_bytes
        self.schema = schema
        self._text_columns = [field.name for field in schema if _holds_text(field.type)]
        self.undeclared_columns: dict[str, int] = {}

    @classmethod
    def open(cls, files: Sequence[InputFile], max_row_bytes: int, known: KnownTypes | None = None) -> ParquetSource:
        """Read all footers and unite their schemas, nulls alone as in `known`. Raises InputError as the module says."""
        footers = [_read_footer(file) for file in files]
        return cls(files, footers, unite(files, [footer.schema for footer in footers], known or {}), max_row_bytes)

    @property
    def mixed(self) -> bool:
        """Whether the files do not agree on the type of a column, encodings and nulls alone aside."""
        return differ([footer.schema for footer in self._footers])

    @property
    def num_rows(self) -> int | None:
        return sum(sum(footer.group_rows) for footer in self._footers)

    def own_columns(self, file: int) -> Collection[str]:
        return self._footers[file].schema.names  # type: ignore[no-any-return]

    def select(self, columns: Sequence[str]) -> ParquetSource:
        schema = pa.schema([self.schema.field(name) for name in columns])
        return ParquetSource(self._files, self._footers, schema, self._max_row_bytes)

    def batches(self, start: Position) -> Iterator[InputBatch]:
        file, footer = self._files[start.file], self._footers[start.file]
        with _open(file, len(footer.schema)) as parquet:
            first_rows = accumulate(footer.group_rows, initial=0)
            for group, (first, count) in enumerate(zip(first_rows, footer.group_rows, strict=False)):
                if start.row < first + count:
                    steps = self._group(parquet, file, footer, group, skip=max(0, start.row - first))
                    declared = (self._declared(file, Position(start.file, first + row), rows) for row, rows in steps)
                    yield from (self._checked(file, batch) for batch in joined(declared))

    def _group(
        self, parquet: pq.ParquetFile, file: InputFile, footer: _Footer, group: int, skip: int
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The rows of one row group after the first `skip`, each few with their first row's number in the group."""
        there = set(footer.schema.names)
        columns = [name for name in self.schema.names if name in there]
        bytes_per_row = footer.group_bytes[group] / max(1, footer.group_rows[group])
        step_rows = max(1, min(_STEP_ROWS, int(MAX_BATCH_BYTES / max(1.0, bytes_per_row))))
        row = 0
        try:
            for rows in parquet.iter_batches(step_rows, row_groups=[group], columns=columns, use_threads=False):
                if row + rows.num_rows > skip:
                    unread = max(0, skip - row)
                    yield row + unread, rows.slice(unread)
                row += rows.num_rows
        except (pa.ArrowException, OSError) as error:
            refuse_shortage(error, file.path)
            way_out = "" if is_disk_error(error) else "; get a good copy"
            raise InputError(f"{file.path}: row group {group} cannot be read: {error}{way_out}") from error
        if row != footer.group_rows[group]:
            raise InputError(
                f"{file.path}: row group {group} has {row} rows, and its footer says {footer.group_rows[group]}; "
                "the file is damaged, get a good copy"
            )

    def _checked(self, file: InputFile, batch: InputBatch) -> InputBatch:
        """A batch of declared rows with the errors of both checks."""
        checked = self._batch(file, batch.position, batch.rows)
        return InputBatch(batch.position, checked.rows, dict(sorted((batch.errors | checked.errors).items())))

    def _declared(self, file: InputFile, position: Position, rows: pa.RecordBatch) -> InputBatch:
        """`rows` with exactly the declared columns and types; a row with a value that does not fit is an error."""
        present = set(rows.schema.names)
        arrays: list[pa.Array] = []
        misfits: dict[int, str] = {}
        for field in self.schema:
            column = rows.column(field.name) if field.name in present else pa.nulls(rows.num_rows, field.type)
            fitted, problems = _cast(column, field)
            arrays.append(fitted)
            misfits = problems | misfits
        declared = record_batch(arrays, self.schema, rows.num_rows)
        errors = {
            index: RowError("bad_input", f"{file.path}: row {position.row + index}: {problem}")
            for index, problem in sorted(misfits.items())
        }
        return InputBatch(position, blank_rows(declared, list(errors)) if errors else declared, errors)

    def _batch(self, file: InputFile, position: Position, rows: pa.RecordBatch) -> InputBatch:
        problems = self._not_text(rows) | self._too_large(rows)
        if not problems:
            return InputBatch(position, rows)
        errors = {
            index: RowError("bad_input", f"{file.path}: row {position.row + index} {problem}")
            for index, problem in sorted(problems.items())
        }
        return InputBatch(position, blank_rows(rows, list(errors)), errors)

    def _too_large(self, rows: pa.RecordBatch) -> dict[int, str]:
        """Rows over the size limit: their index in the batch -> the problem."""
        limit = self._max_row_bytes
        if rows.nbytes <= limit:
            return {}
        sizes = enumerate(rows.slice(row, 1).nbytes for row in range(rows.num_rows))
        return {row: f"has {size} bytes, more than input.max_row_bytes {limit}" for row, size in sizes if size > limit}

    def _not_text(self, rows: pa.RecordBatch) -> dict[int, str]:
        """Rows with invalid UTF-8, which no reader of results could read: their index in the batch -> the problem."""
        problems: dict[int, str] = {}
        for name in self._text_columns:
            column = rows.column(name)
            if not _is_valid(column):
                bad = [row for row in range(len(column)) if not _is_valid(column.take(pa.array([row])))]
                problems |= dict.fromkeys(bad, f"has invalid UTF-8 in column {name!r}")
        return problems


def _holds_text(type_: pa.DataType) -> bool:
    if pa.types.is_nested(type_):
        return any(_holds_text(type_.field(number).type) for number in range(type_.num_fields))
    return is_text(type_)


def _is_valid(column: pa.Array) -> bool:
    """Whether what Arrow holds is what its type says: Parquet's reader takes any bytes for text."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _cast(column: pa.Array, field: pa.Field) -> tuple[pa.Array, dict[int, str]]:
    """`column` in the type of `field`; what does not fit is null, and its row is returned with the reason."""
    if isinstance(column.type, pa.UuidType) and not pa.types.is_fixed_size_binary(field.type):
        column = pa.array([None if value is None else str(value) for value in column.to_pylist()], pa.string())
    fitted, misfits = cast_each(column, field.type)
    return fitted, {
        row: f"column {field.name!r} is {column.type} here and {field.type} in all files together, which cannot hold "
        f"this value ({error}); give the column one type in all files"
        for row, error in misfits.items()
    }


@contextmanager
def _open(file: InputFile, columns: int = 1) -> Iterator[pq.ParquetFile]:
    """The open file. Raises InputError where it is not Parquet, whole and readable.

    Of an object each column is read in ranges of its own, some MiB ahead and the less the more `columns` there are.
    """
    source: Any = file.path
    buffer_bytes = _BUFFER_BYTES
    if isinstance(file.path, RemotePath):
        source = file.path.open_ranges()
        share = _REMOTE_BUFFERS_BYTES // max(1, columns)
        buffer_bytes = min(_REMOTE_BUFFER_BYTES, max(_BUFFER_BYTES, share))
    try:
        opened = pq.ParquetFile(
            source,
            buffer_size=buffer_bytes,
            pre_buffer=False,
            page_checksum_verification=True,
            coerce_int96_timestamp_unit="us",  # in nanoseconds the year 9999 would be 1816
        )
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        refuse_shortage(error, file.path)
        if is_disk_error(error):
            raise InputError(f"{file.path}: cannot be read: {error}") from error
        raise InputError(
            f"{file.path}: not a whole Parquet file ({error}); it was cut off while it was written or is something else"
        ) from error
    with opened:
        yield opened


def _read_footer(file: InputFile) -> _Footer:
    with _open(file) as parquet:
        metadata, schema = parquet.metadata, parquet.schema_arrow
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    num_rows = sum(group.num_rows for group in groups)
    if num_rows != metadata.num_rows:
        raise InputError(
            f"{file.path}: the footer is damaged: it says {metadata.num_rows} rows, and {num_rows} in its row groups; "
            "get a good copy"
        )
    for number, group in enumerate(groups):
        if group.total_byte_size > max(_BOMB_BYTES, _BOMB_RATIO * file.size):
            raise InputError(
                f"{file.path}: row group {number} would unpack to {group.total_byte_size / 2**30:.1f} GiB "
                f"from a file of {file.size} bytes; that is not data but a decompression bomb"
            )
    _refuse_twins(file, "columns", list(schema))
    for column in schema:
        _refuse_twins_inside(file, f"fields in column {column.name!r}", column.type)
    return _Footer(tuple(g.num_rows for g in groups), tuple(g.total_byte_size for g in groups), schema)


def _refuse_twins(file: InputFile, what: str, fields: Sequence[pa.Field]) -> None:
    """Raise InputError for a name that two of these have."""
    names = [field.name for field in fields]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"{file.path}: two {what} are named {twice!r}; give each its own name")


def _refuse_twins_inside(file: InputFile, what: str, kind: pa.DataType) -> None:
    """The same for fields of structs, however deep."""
    if pa.types.is_nested(kind):
        fields = [kind.field(number) for number in range(kind.num_fields)]
        _refuse_twins(file, what, fields)
        for field in fields:
            _refuse_twins_inside(file, what, field.type)
