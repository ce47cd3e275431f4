"""The error rows of a run, from its parts, and of open shards from their journals and the plan: by code, some of each.

What the plan found unable to run is told before its shard has its turn: it may be why the run has stopped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow.compute as pc

from bulkrun.data.results.parts import read_part_columns, read_part_info, read_part_schema
from bulkrun.job.plan.rows import id_texts
from bulkrun.job.plan.shard_file import read_refused, read_shard
from bulkrun.job.store.journal import read_outcomes
from bulkrun.job.store.journal_files import journals_by_shard
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import RunRecord, read_record
from bulkrun.request import RowError

_COLUMNS = ["row", "sample", "error_code", "error_message"]


@dataclass(frozen=True)
class ErrorRow:
    """One output row that holds an error. `id` is the text of its `input.id`, None where it has none."""

    row: int
    id: str | None
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
    record, is_finished, committed = read_record(run), run.success.exists(), run.committed_shards()
    for shard in sorted(committed):
        if read_part_info(run.part(shard)).errors:
            yield from _of_part(run.part(shard), record)
    if is_finished:  # `compact` gives its parts other numbers than their shards had
        return
    open_shards, journals = run.planned_shards() - committed, journals_by_shard(run)
    for shard in sorted(open_shards):
        yield from _of_open_shard(run, shard, journals.get(shard, []), record)


def _of_part(part: Path, record: RunRecord) -> Iterator[ErrorRow]:
    name = record.id_column(read_part_schema(part).names)
    for table in read_part_columns(part, [*_COLUMNS, *([name] if name else [])]):
        failed = table.filter(pc.is_valid(table["error_code"]))
        ids = id_texts(failed[name], name) if name else [None] * failed.num_rows
        rows, samples, codes, messages = (failed[column].to_pylist() for column in _COLUMNS)
        yield from map(ErrorRow, rows, ids, samples, codes, messages)


def _of_open_shard(run: RunDir, shard: int, journals: list[Path], record: RunRecord) -> Iterator[ErrorRow]:
    failed = {
        key: RowError(found.error_code, found.error_message or "")
        for key, found in read_outcomes(journals).answered.items()
        if found.error_code is not None
    }
    for row, error in read_refused(run.shard(shard)).items():
        failed |= {(row, sample): error for sample in range(record.samples)}
    ids = _planned_ids(run, shard, record) if failed else {}
    for (row, sample), error in sorted(failed.items()):
        yield ErrorRow(row, ids.get(row), sample, error.code, error.message)


def _planned_ids(run: RunDir, shard: int, record: RunRecord) -> dict[int, str | None]:
    """Row -> its id; empty where the rows have none."""
    _, table = read_shard(run.shard(shard))
    carried = table["passthrough"].combine_chunks()
    name = record.id_column([field.name for field in carried.type])
    return dict(zip(table["row"].to_pylist(), id_texts(carried.field(name), name), strict=True)) if name else {}
