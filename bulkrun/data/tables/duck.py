"""DuckDB with its doors shut: one SELECT over files that were named before, bounded memory, nothing else.

Knows neither inputs nor runs. A query may come from a job file that somebody else wrote, so it can read only the files
it was given, write nothing, load nothing and change no setting.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import duckdb

from bulkrun.data.types.json_types import is_unicode
from bulkrun.errors import InputError

MEMORY_LIMIT = "1GB"
MAX_THREADS = 4
_INTERRUPT_AGAIN_S = 0.05
# Types whose values are others in Arrow: negative from 2^127 on, without their zone, DuckDB's own bytes.
_CHANGED_BY_ARROW = frozenset({"uhugeint", "time with time zone", "bit", "bignum"})
_NESTED = frozenset({"list", "array", "struct", "map", "union"})

_Result = TypeVar("_Result")


class NotASelect(ValueError):
    """The text is not exactly one SELECT statement."""


def locked_connection(
    *, files: Sequence[Path | str] = (), folders: Sequence[Path] = (), spill: Path | None = None, objects: Any = None
) -> duckdb.DuckDBPyConnection:
    """An in-memory database that can read `files` and what is in `folders`, spilling to the folder `spill` if any.

    `objects` is the fsspec file system of those files that are `s3://` URLs. Raises InputError for a path that DuckDB
    cannot be told.
    """
    paths, roots = ([str(path) for path in named] for named in (files, folders))
    for path in (*paths, *roots):
        if not is_unicode(path):
            raise InputError(f"{path!a}: the path is not UTF-8, where DuckDB reads nothing; rename the folder")
    connection = duckdb.connect(":memory:")
    if objects is not None:
        connection.register_filesystem(objects)
    settings: dict[str, object] = {
        "TimeZone": "UTC",  # else the machine's own would be part of the results
        "enable_progress_bar": False,  # on stdout, wherever Python has no script: notebooks, spawned processes
        "memory_limit": MEMORY_LIMIT,
        "temp_directory": str(spill) if spill else "",
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        # DuckDB asks for the pattern first and then for every file that it found with it.
        "allowed_paths": [*paths, *map(no_glob, paths)],
        "allowed_directories": [*roots, *map(no_glob, roots)],
        "enable_external_access": False,
    }
    for name, value in settings.items():
        connection.execute(f"SET {name} = $1", [value])
    threads = connection.execute("SELECT current_setting('threads')").fetchall()[0][0]
    connection.execute(f"SET threads = {min(MAX_THREADS, int(threads))}")
    connection.execute("SET lock_configuration = true")
    return connection


def interruptible(connection: duckdb.DuckDBPyConnection, work: Callable[[], _Result]) -> _Result:
    """What `work` returns, a call that keeps `connection` busy; what a signal's handler raises meanwhile ends it.

    `work` has a thread of its own: in the main one DuckDB itself would call the handler, rename what that raises to a
    RuntimeError, and wait until its other threads have finished the query. A signal that comes while the thread starts
    leaves it at work as well, so what it works on is there before it. Whoever hears of an end can close the connection.
    """
    result: Future[_Result] = Future()
    try:
        Thread(target=_run, args=(work, result), name="duckdb").start()
        return result.result()
    except BaseException:
        _end(connection, result)
        raise


def _end(connection: duckdb.DuckDBPyConnection, result: Future[_Result]) -> None:
    try:
        result.cancel()  # before it has begun: it never will
        while not result.done():  # one interrupt may come before DuckDB has begun, and is forgotten then
            connection.interrupt()
            wait([result], _INTERRUPT_AGAIN_S)
    except BaseException:  # of another signal, as of a second Ctrl-C: what the first one ended has to end all the same
        _end(connection, result)
        raise


def _run(work: Callable[[], _Result], result: Future[_Result]) -> None:
    if result.set_running_or_notify_cancel():
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)


def single_select(connection: duckdb.DuckDBPyConnection, sql: str) -> str:
    """The statement, parsed. Raises NotASelect, or duckdb.Error for a syntax error."""
    statements = connection.extract_statements(sql)
    if len(statements) != 1:
        raise NotASelect(f"exactly one SELECT is wanted, but there are {len(statements)} statements")
    if statements[0].type != duckdb.StatementType.SELECT:
        raise NotASelect(f"only SELECT is allowed, but this is {statements[0].type.name}")
    return str(statements[0].query)


def changed_by_arrow(kind: Any) -> bool:
    """Whether Arrow would hold other values than those of this SQL type, or of one inside it."""
    # An array has its size among its children.
    inside = [inner for _, inner in kind.children if isinstance(inner, type(kind))] if kind.id in _NESTED else []
    return kind.id in _CHANGED_BY_ARROW or any(map(changed_by_arrow, inside))


def with_text_for_arrow(relation: duckdb.DuckDBPyRelation) -> duckdb.DuckDBPyRelation:
    """The relation with DuckDB's text of the columns that Arrow would change."""
    changed = [changed_by_arrow(kind) for kind in relation.types]
    if not any(changed):
        return relation
    columns = enumerate(zip(relation.columns, changed, strict=True), start=1)  # by number: two may have one name
    as_text = "CAST(#{0} AS VARCHAR) AS {1}"
    return relation.project(
        ", ".join(as_text.format(n, _as_name(name)) if is_changed else f"#{n}" for n, (name, is_changed) in columns)
    )


def view_of_parquet(
    connection: duckdb.DuckDBPyConnection,
    name: str,
    files: Sequence[Path | str],
    *,
    union_by_name: bool = False,
    folder_columns: Mapping[str, str | None] | None = None,
    refused: Mapping[str, str] | None = None,
) -> None:
    """Make the Parquet `files` readable as the view `name`.

    All files have one schema, or their columns are matched with `union_by_name` (which opens every file first).
    `folder_columns` are those that are in the folders' names, with their SQL types (None: as DuckDB guesses); other
    folders, however they are called, make no columns then. Without it DuckDB looks for itself. A query that uses a
    column in `refused` fails with what is said there.
    """
    listed = ", ".join(quoted(no_glob(str(path))) for path in files)
    shown, options = "*", ", union_by_name = true" if union_by_name else ""
    if folder_columns is not None:
        options += f", hive_partitioning = {'true' if folder_columns else 'false'}"
    if folder_columns:
        others = folders_in(files[0]) - folder_columns.keys()
        shown = f"COLUMNS(lambda name: NOT list_contains([{', '.join(map(quoted, sorted(others)))}]::VARCHAR[], name))"
        typed = ", ".join(f"{quoted(column)}: {kind}" for column, kind in folder_columns.items() if kind)
        options += f", hive_types = {{{typed}}}" if typed else ""
    replaced = "*"
    if refused:
        errors = (f"error({quoted(why)}) AS {_as_name(column)}" for column, why in refused.items())
        replaced += f" REPLACE ({', '.join(errors)})"
    table = f"SELECT {shown} FROM read_parquet([{listed}]{options})"
    connection.execute(f'CREATE VIEW "{name}" AS SELECT {replaced} FROM ({table})')


def folders_in(path: Path | str) -> set[str]:
    """The names that folders like lang=en, in which a file is, give to DuckDB as columns."""
    return {folder.partition("=")[0] for folder in Path(path).parent.parts if "=" in folder}


def _as_name(column: str) -> str:
    return '"' + column.replace('"', '""') + '"'


def quoted(text: str) -> str:
    """`text` as an SQL string literal."""
    return "'" + text.replace("'", "''") + "'"


def no_glob(path: str) -> str:
    """`path` for DuckDB's readers, which take every name for a glob: one that means this file alone."""
    return re.sub(r"[*?\[]", r"[\g<0>]", path)
