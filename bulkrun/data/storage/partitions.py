"""Partition folders as Hive, DuckDB and pyarrow read them: `lang=en/year=2024/part-00012.parquet`.

A partition column lives in the folder's name only, not in the file. With a copy in the file DuckDB would still show
the column once, but `pyarrow.dataset(..., partitioning="hive")` refuses the directory (it infers int32 from the folder
and meets int64 in the file). Without one both show it once. Its type is then what the reader infers from the names
(text that looks like a date becomes one); a part's footer carries the declared types, and `bulkrun query` shows those.
Values are percent-encoded, which all readers undo; DuckDB does not undo it in column names, so only plain names are
taken. A text that is Hive's own name for null is encoded too: pyarrow still takes it for null, the others do not.
Knows no plans and no rows.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa

NULL_FOLDER = "__HIVE_DEFAULT_PARTITION__"
MAX_FOLDER_BYTES = 255  # of one name, on every file system in use
PART_NAME = re.compile(r"part-(\d{5,})\.(?:parquet|staged)")

# Letters, digits and a few signs stay as they are, and so does what is not ASCII: it is readable, and percent signs
# would make three bytes of each of its own. Among the rest are separators, quotes, controls and what globs read.
_TO_ENCODE = re.compile(r"[^A-Za-z0-9_.~\-\u0080-\U0010ffff]|[\u0080-\u009f\u2028\u2029]")
_PLAIN_NAME = re.compile(r"[^\W_][\w-]*")
_DUCKDB_TYPES = {
    pa.string(): "VARCHAR",
    pa.large_string(): "VARCHAR",
    pa.bool_(): "BOOLEAN",
    pa.date32(): "DATE",
    pa.int8(): "TINYINT",
    pa.int16(): "SMALLINT",
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    pa.uint8(): "UTINYINT",
    pa.uint16(): "USMALLINT",
    pa.uint32(): "UINTEGER",
    pa.uint64(): "UBIGINT",
}


def duckdb_type(kind: pa.DataType) -> str | None:
    """The SQL type of a partition column, None for a type that no folder can be named by."""
    return _DUCKDB_TYPES.get(kind)


def sql_type(alias: str) -> str:
    """The SQL type of a partition column whose Arrow type is named `alias` (in a part's footer)."""
    return _DUCKDB_TYPES[pa.type_for_alias(alias)]


def is_plain_name(column: str) -> bool:
    """Whether every reader takes this column's name from a folder: letters, digits, - and inner underscores."""
    return _PLAIN_NAME.fullmatch(column) is not None


def folder_name(column: str, value: str | None) -> str:
    """The folder of one value (as text). The caller checks `MAX_FOLDER_BYTES`."""
    if value == NULL_FOLDER:
        return f"{column}=%5F{NULL_FOLDER[1:]}"
    return f"{column}={NULL_FOLDER if value is None else _TO_ENCODE.sub(_percent, value)}"


def _percent(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode())


def folder_values(folder: str) -> dict[str, str | None]:
    """Columns and values (as text) of a part's folder relative to its run: `lang=en/year=2024`."""
    pairs = (name.partition("=") for name in folder.split("/") if name)
    return {column: None if value == NULL_FOLDER else unquote(value) for column, _, value in pairs}


def find_parts(root: Path) -> Iterator[Path]:
    """Every part of a run, in its root and in its partition folders; the run's own state is not looked at."""
    return (Path(entry.path) for entry in _entries(str(root)) if PART_NAME.fullmatch(entry.name))


def find_strangers(root: Path) -> Iterator[Path]:
    """Every Parquet file beside the parts of a run that is none of them: a glob over the parts reads it too."""
    entries = (entry for entry in _entries(str(root)) if entry.name.endswith(".parquet"))
    return (Path(entry.path) for entry in entries if not PART_NAME.fullmatch(entry.name))


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    """Plain text: there may be thousands of folders, and workers look every second."""
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if "=" in entry.name and entry.is_dir(follow_symlinks=False):
            yield from _entries(entry.path)
        else:
            yield entry


def partition_columns(folder: str, types: Mapping[str, str], num_rows: int) -> dict[str, pa.Array]:
    """The columns that a folder stands for, `num_rows` long, in their declared Arrow types (`types`, by column)."""
    return {
        column: pa.repeat(pa.scalar(value, pa.string()).cast(pa.type_for_alias(types[column])), num_rows)
        for column, value in folder_values(folder).items()
    }
