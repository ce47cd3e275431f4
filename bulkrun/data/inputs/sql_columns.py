"""Columns that a query would find with other values than the files have: what DuckDB takes for one, or cannot hold.

Knows names and types; reads no rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from bulkrun.data.tables.duck import folders_in
from bulkrun.data.types.sql_names import sql_name, twins


def in_files_too(paths: Sequence[str | Path], columns: Sequence[Collection[str]]) -> set[str]:
    """Folders' columns that a file has itself (`columns`: of each file). DuckDB would show the folder's value there."""
    own = {sql_name(name) for names in columns for name in names}
    return {name for folder in {str(Path(path).parent) for path in paths} for name in _folders(folder, own)}


def _folders(folder: str, own: Collection[str]) -> Iterator[str]:
    return (name for name in folders_in(f"{folder}/file") if sql_name(name) in own)


def refused_columns(schema: pa.Schema, seen: Iterable[Collection[str]]) -> dict[str, str]:
    """Columns of `input` that DuckDB would read as something else, and why. `seen` are those it sees in each file.

    Each is there once, as SQL names it.
    """
    too_long = {sql_name(field.name): _why_too_long(field) for field in schema if "decimal256(" in str(field.type)}
    return too_long | {sql_name(one): _why_twins(one, other) for names in seen for one, other in twins(names)}


def _why_twins(one: str, other: str) -> str:
    return (
        f"columns '{one}' and '{other}' differ only in case, and SQL would take the first for both; leave them out, or "
        "rename one in the files"
    )


def _why_too_long(field: pa.Field) -> str:
    return (
        f"column '{field.name}' is {field.type}, and DuckDB has no decimals of more than 38 digits; leave the column "
        "out, or write the files with fewer digits"
    )
