"""The error rows of a run, from its parts and from the journals of open shards: by code, and some of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow.compute as pc

from bulkrun.data.parts import read_part_columns, read_part_info
from bulkrun.job.store.journal import read_outcomes
from bulkrun.job.store.run_dir import RunDir

_COLUMNS = ["row", "sample", "error_code", "error_message"]


@dataclass(frozen=True)
class ErrorRow:
    """One output row that holds an error."""

    row: int
    sample: int
    code: str
    message: str


@dataclass(frozen=True)
class ErrorReport:
    """How many rows failed with each code, most frequent first, and the first few of each."""

    counts: dict[str, int]
    examples: dict[str, list[ErrorRow]]


def read_row_errors(run: RunDir, *, examples: int = 3) -> ErrorReport:
    """Collect the error rows of a run, finished or not. Raises RunError on a damaged part."""
    counts: Counter[str] = Counter()
    shown: dict[str, list[ErrorRow]] = {}
    for error in error_rows(run):
        counts[error.code] += 1
        if len(of_code := shown.setdefault(error.code, [])) < examples:
            of_code.append(error)
    ordered = dict(counts.most_common())
    return ErrorReport(ordered, {code: shown[code] for code in ordered})


def error_rows(run: RunDir) -> Iterator[ErrorRow]:
    """Every error row: those of parts in row order, then those of open shards."""
    committed = run.committed_shards()
    for shard in sorted(committed):
        if read_part_info(run.part(shard)).errors:
            for table in read_part_columns(run.part(shard), _COLUMNS):
                failed = table.filter(pc.is_valid(table["error_code"]))
                yield from (ErrorRow(*values) for values in zip(*failed.to_pydict().values(), strict=True))
    for shard in sorted(run.planned_shards() - committed):
        for (row, sample), record in sorted(read_outcomes(run.journals_of(shard)).answered.items()):
            if record.error_code is not None:
                yield ErrorRow(row, sample, record.error_code, record.error_message or "")
