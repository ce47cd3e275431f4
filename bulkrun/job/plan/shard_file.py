"""A planned shard on disk: everything a worker needs to run and commit it, without the input.

An Arrow IPC file (zstd) with a line of its checksum behind it, rows in input order. Columns:

    row           int64          position in the whole input, from 0
    order         int32          rank in which to run the rows of this shard (0 first)
    row_id        string         the id column's value as text; the row number where there is none
    token_ids     list<int32>    the prompt; null for a row that has an error already
    overrides     string         the row's own sampling values, and its adapter, as JSON; null when none
    error_code    string         null for a row that can run
    error_message string
    priority      int32          smaller runs first; null counts as 0
    passthrough   struct<...>    the input columns that go to the output, in their declared types

Schema metadata (`bulkrun.shard`, JSON): shard, window, rows, prompt_tokens (of unique prompts), cost. The checksum is
for all bytes before it: `crc32 ` and 8 hex digits.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa

from bulkrun.data.storage.arrow_errors import read_errors
from bulkrun.data.storage.documents import from_document
from bulkrun.errors import RunError
from bulkrun.request import RowError

METADATA_KEY = b"bulkrun.shard"
_ARROW_END = b"ARROW1"
_CHECKSUM_BYTES = len(b"crc32 01234567\n")


@dataclass(frozen=True)
class ShardInfo:
    """What a plan knows of a shard without reading its rows. `cost` is in estimated tokens.

    `folder` is the partition that all its rows are of, as a path relative to the run ("" without partitions);
    `adapter` names the one of their model ("" without).
    """

    shard: int
    window: int
    rows: int
    prompt_tokens: int
    cost: int
    folder: str = ""
    adapter: str = ""


def shard_schema(passthrough: pa.Schema, info: ShardInfo | None = None) -> pa.Schema:
    """The schema of a shard file whose input declares `passthrough`."""
    fields = [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("order", pa.int32(), nullable=False),
        pa.field("row_id", pa.string(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32())),
        pa.field("overrides", pa.string()),
        pa.field("error_code", pa.string()),
        pa.field("error_message", pa.string()),
        pa.field("priority", pa.int32()),
        pa.field("passthrough", pa.struct(list(passthrough)), nullable=False),
    ]
    metadata = {METADATA_KEY: json.dumps(asdict(info)).encode()} if info else None
    return pa.schema(fields, metadata=metadata)


def shard_bytes(table: pa.Table) -> bytes:
    """The file of a shard, with the rows and the schema of `table`: one zstd batch."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd", unify_dictionaries=True)
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table.combine_chunks())
    contents: bytes = sink.getvalue().to_pybytes()
    return contents + _checksum(contents)


def _checksum(contents: bytes) -> bytes:
    return b"crc32 %08x\n" % zlib.crc32(contents)


def read_shard(path: Path) -> tuple[ShardInfo, pa.Table]:
    """The shard's info and all its rows (a shard fits into memory by construction).

    Raises RunError when it is torn, or a bit of it flipped: its prompts would be others than the user's.
    """
    with _opened(path, check=True) as reader:
        table = reader.read_all()
        if table.column_names != shard_schema(pa.schema([])).names:
            raise KeyError(", ".join(table.column_names))
        return _info(path, table.schema), table


def read_row_ids(path: Path) -> tuple[list[int], list[str]]:
    """The rows of a shard and their ids, and nothing else of it. Raises RunError when it is torn."""
    with _opened(path, ("row", "row_id")) as reader:
        table = reader.read_all()
    return table["row"].to_pylist(), table["row_id"].to_pylist()


def read_refused(path: Path) -> dict[int, RowError]:
    """The rows of a shard that cannot run, and why, and nothing else of it. Raises RunError when it is torn."""
    with _opened(path, ("row", "error_code", "error_message")) as reader:
        table = reader.read_all()
    import pyarrow.compute as pc  # a tenth of the start of `status`, which reads no shard

    rows, codes, messages = (column.to_pylist() for column in table.filter(pc.is_valid(table["error_code"])).columns)
    return {row: RowError(code, message) for row, code, message in zip(rows, codes, messages, strict=True)}


def read_shard_info(path: Path) -> ShardInfo:
    """The shard's info alone (reads the file's footer). Raises RunError when it is torn."""
    with _opened(path) as reader:
        return _info(path, reader.schema)


def _info(path: Path, schema: pa.Schema) -> ShardInfo:
    return from_document(ShardInfo, json.loads((schema.metadata or {})[METADATA_KEY]), path, "a shard of a plan")


# The last three: of columns' names and of metadata. A path that is not UTF-8 (UnicodeEncodeError) is no damage.
_DAMAGE = (pa.ArrowException, OSError, KeyError, json.JSONDecodeError, UnicodeDecodeError)


@contextmanager
def _opened(path: Path, columns: Sequence[str] = (), check: bool = False) -> Iterator[pa.ipc.RecordBatchFileReader]:
    """A reader of the named columns; of all without names. With `check` all bytes are held to their checksum."""
    options = pa.ipc.IpcReadOptions(included_fields=[shard_schema(pa.schema([])).names.index(name) for name in columns])
    try:
        # Not mapped: a disk that fails while a map of it is read kills the process.
        with read_errors(path), pa.OSFile(str(path)) as source:
            end = _end_of_arrow(source, check)
            with pa.ipc.open_file(source, footer_offset=end, options=options) as reader:
                yield reader
    except _DAMAGE as error:
        raise RunError(
            f"{path}: not a whole shard of the plan ({error}); the disk or another program damaged it: start again "
            "with --fresh"
        ) from error


def _end_of_arrow(source: pa.OSFile, check: bool) -> int:
    """How many bytes the Arrow file takes. Raises ArrowInvalid where it is checked and another than was written."""
    size = source.size()
    end = max(0, size - _CHECKSUM_BYTES)
    if (checksum := source.read_at(size - end, end)).endswith(_ARROW_END):
        return int(size)  # planned by a bulkrun that wrote no checksum, before December 2026
    if check and _checksum(source.read_at(end, 0)) != checksum:
        raise pa.ArrowInvalid("its checksum is wrong")
    return int(end)
