"""DuckDB with its doors shut: one SELECT over files that were named before, bounded memory, nothing else.

Knows neither inputs nor runs. A query may come from a job file that somebody else wrote, so it can read only the files
it was given, write nothing, load nothing and change no setting.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb

MEMORY_LIMIT = "1GB"
MAX_THREADS = 4


class NotASelect(ValueError):
    """The text is not exactly one SELECT statement."""


def locked_connection(
    *, files: Sequence[Path | str] = (), folders: Sequence[Path] = (), spill: Path | None = None, objects: Any = None
) -> duckdb.DuckDBPyConnection:
    """An in-memory database that can read `files` and what is in `folders`, spilling to the folder `spill` if any.

    `objects` is the fsspec file system of those files that are `s3://` URLs.
    """
    connection = duckdb.connect(":memory:")
    paths, roots = ([str(path) for path in named] for named in (files, folders))
    if objects is not None:
        connection.register_filesystem(objects)
    settings: dict[str, object] = {
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


def single_select(connection: duckdb.DuckDBPyConnection, sql: str) -> str:
    """The statement, parsed. Raises NotASelect, or duckdb.Error for a syntax error."""
    statements = connection.extract_statements(sql)
    if len(statements) != 1:
        raise NotASelect(f"exactly one SELECT is wanted, but there are {len(statements)} statements")
    if statements[0].type != duckdb.StatementType.SELECT:
        raise NotASelect(f"only SELECT is allowed, but this is {statements[0].type.name}")
    return str(statements[0].query)


def view_of_parquet(
    connection: duckdb.DuckDBPyConnection,
    name: str,
    files: Sequence[Path | str],
    *,
    union_by_name: bool = False,
    hive_types: Mapping[str, str] | None = None,
) -> None:
    """Make the Parquet `files` readable as the view `name`.

    All files have one schema, or their columns are matched with `union_by_name` (which opens every file first).
    `hive_types` are the SQL types of columns that are in the folders' names; other folders, however they are called,
    make no columns then. Without it DuckDB looks for itself.
    """
    listed = ", ".join(quoted(no_glob(str(path))) for path in files)
    shown, options = "*", ", union_by_name = true" if union_by_name else ""
    if hive_types is not None:
        options += f", hive_partitioning = {'true' if hive_types else 'false'}"
    if hive_types:
        names = {folder.partition("=")[0] for folder in Path(files[0]).parts if "=" in folder} - hive_types.keys()
        shown = (
            f"COLUMNS(lambda name: NOT list_contains([{', '.join(map(quoted, sorted(names)))}], name))"
            if names
            else "*"
        )
        options += f", hive_types = {{{', '.join(f'{quoted(key)}: {kind}' for key, kind in hive_types.items())}}}"
    connection.execute(f'CREATE VIEW "{name}" AS SELECT {shown} FROM read_parquet([{listed}]{options})')


def quoted(text: str) -> str:
    """`text` as an SQL string literal."""
    return "'" + text.replace("'", "''") + "'"


def no_glob(path: str) -> str:
    """`path` for DuckDB's readers, which take every name for a glob: one that means this file alone."""
    return re.sub(r"[*?\[]", r"[\g<0>]", path)
