"""Rows that were published before, written as a part once more: another attempt, counts of their own."""

from __future__ import annotations

import secrets
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from bulkrun.data.durable import disk_errors
from bulkrun.data.parts import PartInfo, count_cut, write_part
from bulkrun.job.store.run_record import RunRecord


def write_again(folder: Path, table: pa.Table, like: PartInfo, record: RunRecord) -> tuple[Path, PartInfo]:
    """Write and fsync `table` under a temporary name in `folder`; the file, and its footer (else like `like`).

    Raises RunError on a bad disk.
    """
    info = replace(
        like,
        attempt=secrets.token_hex(8),
        input_rows=table.num_rows // record.samples,
        rows=table.num_rows,
        errors=dict(Counter(code for code in table["error_code"].to_pylist() if code is not None)),
        cut=count_cut(table),
        prompt_tokens=_sum(table, "prompt_tokens"),
        completion_tokens=_sum(table, "completion_tokens"),
    )
    tmp = folder / f"part-{info.shard:05d}.{info.attempt}.tmp"
    with disk_errors("writing a part", tmp):
        write_part(tmp, table, info, compression=record.job["output"]["compression"])
    return tmp, info


def _sum(table: pa.Table, column: str) -> int:
    total: Any = pc.sum(table[column]).as_py()
    return int(total or 0)
