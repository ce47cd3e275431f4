"""One way to read an input, whatever its files are: declared schema first, then bounded batches from any position.

    with open_input(["data/*.jsonl"]) as dataset:
        for batch in dataset.batches(start=Position(0, 4096)): ...

Knows which reader serves which format; the readers know the formats. Rows in = rows out: every line, record or Parquet
row comes out exactly once, in order, as values or as an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import pyarrow as pa

from bulkrun.data.inputs.batch import FileSource, InputBatch, Position, Source
from bulkrun.data.inputs.csv_reader import CsvSource
from bulkrun.data.inputs.files import InputFile, find_files
from bulkrun.data.inputs.folder_columns import with_folder_columns
from bulkrun.data.inputs.jsonl import ChooseColumns, JsonlSource, NeededKeys
from bulkrun.data.inputs.no_rows import NoRows
from bulkrun.data.inputs.parquet import ParquetSource
from bulkrun.data.types.known_types import KnownTypes
from bulkrun.errors import InputError
from bulkrun.scratch import Scratch

MAX_ROW_BYTES = 16 * 2**20
START = Position(0, 0)


@dataclass(frozen=True)
class Dataset:
    """An input: its files (to fingerprint) and its rows.

    With `input.sql`, `files` are the files that the query read while the rows (and `Position.file`, always 0) are those
    of the snapshot.
    """

    files: list[InputFile]
    source: Source
    num_sources: int
    _folder: Scratch | None = None

    @property
    def schema(self) -> pa.Schema:
        """The declared columns, known before the first row is read."""
        return self.source.schema

    @property
    def num_rows(self) -> int | None:
        """All rows, where that is known without reading them (Parquet), else None."""
        return self.source.num_rows

    @property
    def is_void(self) -> bool:
        """Whether there is no row and nothing that shows the columns: JSON lines or CSV without a line."""
        if isinstance(self.source, NoRows):
            return True
        told = self.num_rows is not None or (self.files[0].format == "csv" and bool(self.schema.names))
        return not told and next(self.batches(limit=1), None) is None

    def of_no_rows(self, schema: pa.Schema) -> Dataset:
        """A void input, given the columns that are expected of it."""
        return replace(self, source=NoRows(schema), num_sources=0)

    def refuse_unreadable(self) -> None:
        """Raise InputError where there are rows and none of the first could be read, so that nothing tells the columns.

        It says what is wrong with the first one.
        """
        first = None if self.schema.names else next(self.batches(limit=1), None)
        if first is not None and first.errors:
            raise InputError(
                f"{first.errors[0].message}; none of the first rows can be read, so no row tells the columns (JSON "
                "lines are UTF-8 text with one object on each line)"
            )

    @property
    def undeclared_columns(self) -> dict[str, int]:
        """Columns met while reading that the sample did not show -> rows that had them; their values are dropped."""
        return self.source.undeclared_columns

    def select(self, columns: Sequence[str]) -> Dataset:
        """A dataset of these rows with only these columns (names of the schema), which is cheaper to read."""
        return replace(self, source=self.source.select(columns))

    def batches(self, start: Position = START, limit: int | None = None) -> Iterator[InputBatch]:
        """All rows from `start` on, at most `limit`. Raises InputError where a file breaks in the middle."""
        left = limit
        for file in range(start.file, self.num_sources):
            for batch in self.source.batches(start if file == start.file else Position(file, 0)):
                if left is None:
                    yield batch
                    continue
                if batch.rows.num_rows > left:
                    batch = batch.head(left)
                left -= batch.rows.num_rows
                if batch.rows.num_rows:
                    yield batch
                if left == 0:
                    return

    def close(self) -> None:
        """Remove what was only made for this reading (a snapshot that no run keeps)."""
        if self._folder:
            self._folder.close()

    def __enter__(self) -> Dataset:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_input(
    paths: str | Sequence[str],
    *,
    sql: str | None = None,
    sql_snapshot: Path | None = None,
    max_row_bytes: int = MAX_ROW_BYTES,
    delimiter: str | None = None,
    kept_as_text: ChooseColumns | None = None,
    known_types: KnownTypes | None = None,
    needed_keys: NeededKeys | None = None,
) -> Dataset:
    """Find the files and declare the schema.

    With `sql`, its result is written once to `sql_snapshot` and read from there ever after; without a path it lives
    until the dataset is closed. `delimiter` separates the fields of CSV files. JSON columns that `kept_as_text` chooses
    are read as text: strings as they are, all else as JSON, so that nothing is lost where shapes change. A column of
    nulls alone has its type in `known_types` (what `sql` makes of it is for the query to say). A row of JSON is bad
    that would lose one of the `needed_keys`. Raises InputError for everything that keeps the input from being read as a
    whole.
    """
    files = find_files(paths)
    if sql is None:
        source = _open_files(files, max_row_bytes, delimiter, kept_as_text, known_types, needed_keys)
        return Dataset(files, with_folder_columns(source, files), len(files))
    folder = None
    if sql_snapshot is None:
        folder = Scratch()
        sql_snapshot = folder.path / "input.snapshot"
    if not sql_snapshot.exists():
        source = _open_files(files, max_row_bytes, delimiter, kept_as_text, None, needed_keys)
        given = Dataset(files, with_folder_columns(source, files), len(files), folder)
        if given.is_void:  # no columns for a query to name
            return given
        _make_snapshot(given, source, sql, sql_snapshot)
    from bulkrun.data.inputs.sql import SnapshotSource  # DuckDB, which few jobs need, is slow to import

    return Dataset(files, SnapshotSource.open(sql_snapshot, max_row_bytes), 1, folder)


def _make_snapshot(given: Dataset, source: FileSource, sql: str, path: Path) -> None:
    """Run `sql` over the given rows, which `source` reads, and keep its result at `path`."""
    from bulkrun.data.inputs.sql import Given, write_snapshot

    given.refuse_unreadable()
    mixed = isinstance(source, ParquetSource) and source.mixed
    columns = [source.own_columns(file) for file in range(len(given.files))]
    write_snapshot(Given(given.files, columns, given.batches(), given.schema, mixed), sql, path)


def _open_files(
    files: list[InputFile],
    max_row_bytes: int,
    delimiter: str | None,
    kept_as_text: ChooseColumns | None,
    known: KnownTypes | None,
    needed: NeededKeys | None,
) -> FileSource:
    for file in files:
        if file.format != files[0].format:
            raise InputError(
                f"input.path: {files[0].path} is {files[0].format} but {file.path} is {file.format}; "
                "one input has one format: name the files you mean, for example data/*.jsonl"
            )
    if files[0].format == "csv":
        return CsvSource.open(files, max_row_bytes, delimiter)
    if delimiter is not None:
        raise InputError(f"input.delimiter: {files[0].path} is {files[0].format}, not CSV; leave it out")
    if files[0].format == "jsonl":
        return JsonlSource.open(files, max_row_bytes, kept_as_text, known, needed)
    return ParquetSource.open(files, max_row_bytes, known)
