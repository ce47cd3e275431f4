"""Rows that were published before, written as a part once more: another attempt, counts of their own."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from bulkrun.data.results.parts import (
    PartInfo,
    count_ends,
    own_columns,
    read_part_columns,
    read_part_schema,
    write_groups,
)
from bulkrun.data.storage.durable import disk_errors
from bulkrun.job.store.run_record import RunRecord


def write_again(
    folder: Path, tables: Iterable[pa.Table], schema: pa.Schema, like: PartInfo, record: RunRecord
) -> tuple[Path, PartInfo]:
    """Write and fsync `tables` as one part under a temporary name in `folder`; the file, and its footer (else as
    `like`, whose tokens count beside those of the rows). Memory is that of one table at a time.

    Raises RunError on a bad disk, and what `tables` raises; half a file is removed.
    """
    counts = _Counts()
    attempt = secrets.token_hex(8)
    tmp = folder / f"part-{like.shard:05d}.{attempt}.tmp"
    with disk_errors("writing a part", tmp):
        info = write_groups(
            tmp,
            map(counts.counted, tables),
            schema,
            lambda: counts.info(replace(like, attempt=attempt), record.samples),
            compression=record.job["output"]["compression"],
        )
    return tmp, info


@dataclass
class _Counts:
    """What a footer counts, table after table."""

    rows: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)

    def counted(self, table: pa.Table) -> pa.Table:
        self.rows += table.num_rows
        self.ends.update(count_ends(table))
        counted = _counted(table.column_names)
        self.prompt_tokens += _sum(table, "prompt_tokens", counted)
        self.completion_tokens += _sum(table, "completion_tokens", counted)
        self.errors.update(table["error_code"].drop_null().to_pylist())
        return table

    def info(self, like: PartInfo, samples: int) -> PartInfo:
        return replace(
            like,
            input_rows=self.rows // samples,
            rows=self.rows,
            errors=dict(self.errors),
            cut=self.ends["cut"],
            stopped=self.ends["stopped"],
            prompt_tokens=like.prompt_tokens + self.prompt_tokens,
            completion_tokens=like.completion_tokens + self.completion_tokens,
        )


def beside_rows(info: PartInfo, paths: Sequence[Path]) -> PartInfo:
    """`info` with those of its tokens alone that no row of its files tells of: of generations that were not kept."""
    prompt, completion = info.prompt_tokens, info.completion_tokens
    for path in paths:
        counted = _counted(read_part_schema(path).names)
        for table in read_part_columns(path, counted):
            prompt -= _sum(table, "prompt_tokens", counted)
            completion -= _sum(table, "completion_tokens", counted)
    return replace(info, prompt_tokens=prompt, completion_tokens=completion)


def _counted(names: Sequence[str]) -> list[str]:
    """The columns of tokens that the job has made; vectors have no output tokens."""
    return [name for name in ("prompt_tokens", "completion_tokens") if name in own_columns(names)]


def _sum(table: pa.Table, column: str, counted: Sequence[str]) -> int:
    """The sum of a column; 0 where it is none of the counted."""
    total: Any = pc.sum(table[column]).as_py() if column in counted else 0
    return int(total or 0)
