"""SQL over the results of a run, while it goes on or after. Knows file names, nothing of plans or journals.

The query sees the view `results` (all parts) and, by path, the Parquet files of the run. It is one SELECT, and it can
reach nothing outside the run's directory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import duckdb
import pyarrow as pa

from bulkrun.data.results.parts import partition_types
from bulkrun.data.storage.durable import ADVICE
from bulkrun.data.storage.partitions import find_parts, sql_type
from bulkrun.data.storage.shortages import MORE, is_shortage
from bulkrun.data.tables.duck import (
    NotASelect,
    interruptible,
    locked_connection,
    single_select,
    view_of_parquet,
    with_text_for_arrow,
)
from bulkrun.errors import BulkrunError, RunError, UsageError, first_line
from bulkrun.scratch import Scratch


def view_of_parts(connection: duckdb.DuckDBPyConnection, name: str, parts: Sequence[Path]) -> None:
    """Make `parts` of one run readable as the view `name`, partition columns in their declared types.

    Raises RunError when the first part is torn.
    """
    types = partition_types(parts[0])
    folder_columns = {column: sql_type(kind) for column, kind in types.items()}
    view_of_parquet(connection, name, parts, folder_columns=folder_columns)


def run_query(run_root: Path, sql: str, *, limit: int | None = None, schema: pa.Schema | None = None) -> pa.Table:
    """The result of `sql` (at most `limit` rows) over the parts that are committed now.

    With no part yet, `results` is an empty table of `schema` (the run's declared output), if the caller knows it.
    Raises RunError where there is nothing to query or the disk fails, and UsageError, with DuckDB's message, for any
    other query that fails.
    """
    root = run_root.resolve()
    if not root.is_dir():
        raise RunError(f"{run_root}: no such run directory")
    parts = sorted(find_parts(root))
    if not parts and schema is None:
        raise RunError(f"{run_root}: no results yet (no parts); `bulkrun status {run_root}` shows how far the run is")
    with _shortages(), Scratch() as spill, closing(locked_connection(folders=[root], spill=spill)) as connection:
        try:
            return interruptible(connection, partial(_ask, connection, sql, limit, parts, schema))
        except (duckdb.Error, NotASelect) as error:
            said = str(error).partition("\n")[0]  # before the place in the query
            if advice := _advice(error, said):
                raise RunError(f"query: {said}; {advice}") from error
            raise UsageError(f"query: {error}") from error


def _ask(
    connection: duckdb.DuckDBPyConnection, sql: str, limit: int | None, parts: Sequence[Path], schema: pa.Schema | None
) -> pa.Table:
    if parts:
        view_of_parts(connection, "results", parts)
    else:
        assert schema is not None, "without parts and without it nothing is asked"
        connection.register("results", schema.empty_table())
    relation = with_text_for_arrow(connection.sql(single_select(connection, sql)))
    return (relation if limit is None else relation.limit(limit)).to_arrow_table()


@contextmanager
def _shortages() -> Iterator[None]:
    """Raise BulkrunError where DuckDB finds no memory to begin with, or no thread."""
    try:
        yield
    except (MemoryError, RuntimeError, duckdb.Error) as error:
        if not is_shortage(error):
            raise
        raise BulkrunError(f"query: {first_line(error)}; {MORE}") from error


def _advice(error: Exception, said: str) -> str | None:
    """What to do about a disk that fails, None for every other error: DuckDB tells the reason in words alone."""
    if not isinstance(error, duckdb.IOException):
        return None
    return next((advice for number, advice in ADVICE.items() if said.endswith(f": {os.strerror(number)}")), None)
