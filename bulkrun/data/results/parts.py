"""Part files: the committed rows of one shard as Parquet, and what their footers say about themselves.

Written with a declared schema, page checksums and a `bulkrun.part` entry in the footer's key-value metadata,
so that a part can be checked and counted without any other file. Knows nothing of plans, journals or publishing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bulkrun.data.storage.arrow_errors import read_errors
from bulkrun.data.storage.documents import from_document
from bulkrun.data.storage.durable import new_file
from bulkrun.errors import RunError, first_line

METADATA_KEY = b"bulkrun.part"
_ROW_GROUP_BYTES = 64 * 2**20  # uncompressed; a writer's and a reader's memory is about one row group
_ROW_GROUP_ROWS = 65536


@dataclass(frozen=True)
class PartInfo:
    """A part's footer. `rows` counts output rows (input rows x samples); `attempt` is unique for each file written.

    Tokens are those of all generations, also of samples that `best_of` dropped. Of these, `saved_generations` were
    answered by another row's; `cached_tokens` came from the prefix cache. `cut` counts output rows that ended at the
    most tokens they could have, `stopped` those that ran in circles or out of time.

    `generation` 0 is what a run published; a retry, an incremental night or `compact` writes a higher one. `folder` is
    the part's partition ("" without partitions), `partition_types` the Arrow types of its columns by name.
    """

    run_id: str
    plan_hash: str
    shard: int
    attempt: str
    input_rows: int
    rows: int
    errors: dict[str, int]
    prompt_tokens: int
    completion_tokens: int
    versions: dict[str, str]
    generation: int = 0
    folder: str = ""
    partition_types: dict[str, str] = field(default_factory=dict)
    saved_generations: int = 0
    cached_tokens: int = 0
    stopped: int = 0
    cut: int = 0

    @property
    def error_rows(self) -> int:
        """Output rows that hold an error."""
        return sum(self.errors.values())


def own_columns(names: Sequence[str]) -> Sequence[str]:
    """The columns that the job added: they begin with `row`, and before it are the input's, which may have a
    `finish_reason` where the job makes none."""
    return names[names.index("row") :]


def count_ends(table: pa.Table) -> dict[str, int]:
    """`cut` and `stopped` of these output rows; a vector is neither."""
    if "finish_reason" not in own_columns(table.column_names):
        return {"cut": 0, "stopped": 0}
    import pyarrow.compute as pc  # a tenth of the start of a command that only reads

    ends = {"cut": ["length"], "stopped": ["repetition", "timeout"]}
    return {
        name: int(pc.sum(pc.is_in(table["finish_reason"], pa.array(reasons))).as_py() or 0)
        for name, reasons in ends.items()
    }


def write_part(path: Path, table: pa.Table, info: PartInfo, *, compression: str = "zstd") -> None:
    """Write a whole part under a temporary name and fsync it. Raises OSError or RunError; half a file is removed.

    `compression` is one of the codecs of `output.compression`.
    """
    write_groups(path, [table], table.schema, lambda: info, compression=compression)


def write_groups(
    path: Path, tables: Iterable[pa.Table], schema: pa.Schema, info: Callable[[], PartInfo], *, compression: str
) -> PartInfo:
    """As `write_part`, from many tables, each in row groups of its own; `info` is asked when all are written."""
    rows = 0
    with (
        new_file(path) as sink,
        pq.ParquetWriter(sink, schema, compression=compression, write_page_checksum=True) as writer,
    ):
        for table in (table for table in tables if table.num_rows):  # else row groups of no row would be left
            rows += table.num_rows
            writer.write_table(table, row_group_size=_rows_per_group(table))
        footer = info()
        assert footer.rows == rows, f"the footer says {footer.rows} rows, the tables have {rows}"
        writer.add_key_value_metadata({METADATA_KEY: json.dumps(asdict(footer)).encode()})
    return footer


def _rows_per_group(table: pa.Table) -> int:
    bytes_per_row: int = table.nbytes // max(table.num_rows, 1) + 1
    return max(1, min(_ROW_GROUP_ROWS, _ROW_GROUP_BYTES // bytes_per_row))


def read_part_info(path: Path) -> PartInfo:
    """The footer of a part. Raises RunError when the file is torn, or not of this bulkrun."""
    return _info(path, _metadata(path))


def _metadata(path: Path) -> pq.FileMetaData:
    try:
        with read_errors(path):
            return pq.read_metadata(path)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last of a column's name
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> RunError:
    what = f"not a whole Parquet file ({first_line(error)})"
    return RunError(f"{path}: {what}; the disk or another program damaged it")


def _entry(path: Path, metadata: pq.FileMetaData) -> dict[str, Any] | None:
    """What a part says of itself; no checksum of the file's own covers it."""
    entry = (metadata.metadata or {}).get(METADATA_KEY)
    try:
        document = None if entry is None else json.loads(entry)
    except ValueError as error:
        raise _damaged(path, error) from error
    return document


def _info(path: Path, metadata: pq.FileMetaData) -> PartInfo:
    entry = _entry(path, metadata)
    if entry is None:
        raise RunError(f"{path}: a Parquet file that bulkrun did not write; move it out of the result directory")
    info = from_document(PartInfo, entry, path, "the footer of a part")
    if info.rows != metadata.num_rows:
        raise RunError(f"{path}: holds {metadata.num_rows} rows, its footer declares {info.rows}; it is damaged")
    return info


def partition_types(path: Path) -> dict[str, str]:
    """The Arrow types (as text) of the columns in the folders' names above a part; {} where there are none.

    Raises RunError when the file is torn.
    """
    entry = _entry(path, _metadata(path))
    return dict(entry.get("partition_types", {})) if entry else {}


def row_bounds(paths: Iterable[Path]) -> tuple[int, int]:
    """The lowest and the highest row number in parts, from their statistics; (0, -1) when they hold no row.

    Raises RunError when one is torn.
    """
    low, high = [], []
    for path in paths:
        metadata = _metadata(path)
        leaves = [metadata.schema.column(leaf).path for leaf in range(metadata.num_columns)]
        column = leaves.index("row")
        for group in range(metadata.num_row_groups):
            if metadata.row_group(group).num_rows:
                statistics = metadata.row_group(group).column(column).statistics
                low.append(statistics.min)
                high.append(statistics.max)
    return (min(low), max(high)) if low else (0, -1)


def read_part_schema(path: Path) -> pa.Schema:
    """The Arrow schema of a part, without its metadata. Raises RunError when the file is torn."""
    return _metadata(path).schema.to_arrow_schema().remove_metadata()


def read_part_columns(path: Path, columns: list[str] | None = None) -> Iterator[pa.Table]:
    """The rows of a part in row groups, every page's checksum verified. Raises RunError on a flipped bit."""
    _metadata(path)
    try:
        with read_errors(path), pq.ParquetFile(path, page_checksum_verification=True) as file:
            for group in range(file.num_row_groups):
                yield file.read_row_group(group, columns=columns)
    except (pa.ArrowException, OSError) as error:
        raise RunError(f"{path}: damaged ({first_line(error)}); {_way_out(path)}") from error


def _way_out(path: Path) -> str:
    """What was computed by the plan can be computed again; what was changed after the run's end cannot."""
    if read_part_info(path).generation:
        return "restore this file from a backup: it was rewritten after the run's end, so it is not made again"
    return "delete this file and _SUCCESS, then run the same command again"
