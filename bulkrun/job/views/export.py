"""A run's results as one file in input order, in a format that other programs read.

Reads parts alone, in bounded memory. Counts the rows against the run's totals before a file gets its name, so that
rows can never be missing unnoticed. Knows no terminal.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc

from bulkrun.data.inputs.python_rows import with_text
from bulkrun.data.results.export_files import CsvSink, JsonlSink, RowSink, json_line, readable_rows
from bulkrun.data.results.parts import read_part_columns, read_part_info
from bulkrun.data.storage.durable import disk_errors, read_json
from bulkrun.data.storage.partitions import partition_columns
from bulkrun.data.tables.in_order import in_row_order
from bulkrun.data.tables.row_groups import RowGroupWriter
from bulkrun.data.types.nested import is_text
from bulkrun.errors import RunError, UsageError
from bulkrun.job.plan.result_columns import PROMPT_TOKEN_IDS, TOKEN_IDS, usual_fields
from bulkrun.job.plan.rows import id_texts
from bulkrun.job.prompts.body_keys import OVER_PROMPT, RESPONSES_URL
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import RunRecord, read_record
from bulkrun.job.store.run_totals import RunTotals, read_totals
from bulkrun.job.views.export_schema import declared_schema
from bulkrun.job.views.export_target import STDOUT, ExportOptions, check_targets, open_targets
from bulkrun.job.views.openai_lines import BatchLines, LineMaker
from bulkrun.settings import Task

_ROWS_PER_GROUP = 65536
# What the lines of the format openai are made of, where a run has it.
_LINE_COLUMNS = ("url", "reasoning", "tool_calls", "logprobs", OVER_PROMPT, PROMPT_TOKEN_IDS, TOKEN_IDS)
_OF_PAIRS = ("url", "body")  # and without these there are none: an answer to /v1/rerank has the documents
_OF_RESPONSES = ("body",)  # an answer to /v1/responses says what was asked


@dataclass
class ExportReport:
    """What was written: output rows, and for openai lines of each kind.

    `missing` are output rows that a run that is not `finished` has not committed; None while their number is not known.
    """

    finished: bool
    missing: int | None = 0
    rows: int = 0
    output_lines: int = 0
    error_lines: int = 0


def export_run(run: RunDir, options: ExportOptions, stdout: IO[bytes]) -> ExportReport:
    """Write the results of a run to one file (openai: two), or to `stdout`.

    Raises RunError for a run that is not finished (unless `partial`), is damaged, or whose rows do not add up, and
    UsageError for a target that cannot be written to, and for labels as OpenAI's lines that are not scores of such.
    """
    record, totals = read_record(run), read_totals(run)
    if totals is None and not options.partial:
        raise RunError(
            f"{run.root}: not finished, so rows would be missing; `bulkrun status {run.root}` shows how far it is, "
            "--partial exports what is committed"
        )
    if options.format == "openai" and _lines_of(record) == "classify":
        _refuse_labels(run, record)
    check_targets(run, options)
    report = ExportReport(finished=totals is not None)
    with open_targets(options, stdout) as streams:
        rows = _Rows(run, record, options)
        if options.format == "openai":
            _write_lines(rows, record, options, streams, report)
        else:
            _write_table(rows, options, streams[options.path], report)
        _check_count(run, rows.num_read, totals)
    if totals is None:
        planned = read_json(run.plan_complete)
        report.missing = planned["rows"] * record.samples - rows.num_read if planned else None
    return report


def _usual(record: RunRecord) -> tuple[pa.Field, ...]:
    prompt = record.job["prompt"]
    text_lists, score_lines = (bool(prompt.get(key)) for key in ("text_lists", "score_lines"))
    return usual_fields(record.task, text_lists=text_lists, score_lines=score_lines)


def _lines_of(record: RunRecord) -> Task:
    """The task of which the answers are: cosines are scores, as those of a model of pairs."""
    return "classify" if record.job["prompt"].get("score_lines") else record.task


def _refuse_labels(run: RunDir, record: RunRecord) -> None:
    """Raise UsageError for a job that classifies anything but lines of pairs, or whose results do not hold them."""
    if not record.job["prompt"].get("score_lines"):
        raise UsageError("--format openai: OpenAI's batches have no labels; take jsonl, csv or parquet")
    names = declared_schema(run).names
    if missing := [name for name in _OF_PAIRS if name not in names]:
        raise UsageError(
            f"--format openai: the results have no column {' and '.join(missing)} (input.columns left it out), and the "
            "answers are made of it; take jsonl, csv or parquet"
        )


def _check_count(run: RunDir, num_read: int, totals: RunTotals | None) -> None:
    expected = num_read if totals is None else totals.ok + sum(totals.errors.values())
    if num_read != expected:
        raise RunError(
            f"{run.root}: the parts hold {num_read} rows, _SUCCESS says {expected}; "
            f"`bulkrun verify {run.root}` tells what is wrong"
        )


class _Rows:
    """The output rows of a run in input order, with the columns that the format needs."""

    def __init__(self, run: RunDir, record: RunRecord, options: ExportOptions) -> None:
        self._parts = run.parts()
        self._only = options.only
        self._spill = None if options.path == STDOUT else options.path.parent
        self.num_read = 0
        self.schema = declared_schema(run)
        self.id_column = record.id_column(self.schema.names)
        if options.format == "openai":
            fields = (field.name for field in _usual(record))
            wanted = {*_LINE_COLUMNS, *self._of_lines(_lines_of(record)), *fields, self.id_column}
            self.schema = pa.schema([field for field in self.schema if field.name in wanted])

    def _of_lines(self, task: Task) -> Sequence[str]:
        """The columns beyond the usual ones that lines are made of."""
        if task == "classify":
            return _OF_PAIRS
        return _OF_RESPONSES if task == "generate" and self._has_responses() else ()

    def _has_responses(self) -> bool:
        """Whether a line is one of /v1/responses: of all others what was asked need not be read and sorted."""
        if "url" not in self.schema.names:
            return False
        urls = (_as_asked(table)["url"] for table in self._read(pa.schema([self.schema.field("url")])))
        # a column of the input that only has the name may hold anything
        texts = (url.cast(pa.string()) for url in urls if pa.types.is_dictionary(url.type) or is_text(url.type))
        return any(pc.any(pc.match_substring(text, RESPONSES_URL)).as_py() for text in texts)

    def tables(self) -> Iterator[pa.Table]:
        """Small tables, in order."""
        numbers = (table["row"] for path in self._parts.values() for table in read_part_columns(path, ["row"]))
        last = max((pc.max(column).as_py() or 0 for column in numbers), default=0)
        with disk_errors("sorting the rows in temporary files", self._spill or Path(tempfile.gettempdir())):
            for table in in_row_order(self._read(self.schema), range(last + 1), self._spill):
                self.num_read += table.num_rows
                yield self._chosen(table)

    def _read(self, schema: pa.Schema) -> Iterator[pa.Table]:
        for path in self._parts.values():
            info = read_part_info(path)
            own = [name for name in schema.names if name not in info.partition_types]
            for table in read_part_columns(path, own):
                for name, column in partition_columns(info.folder, info.partition_types, table.num_rows).items():
                    table = table.append_column(name, column)
                yield table.select(schema.names).cast(schema)

    def _chosen(self, table: pa.Table) -> pa.Table:
        if self._only == "all":
            return table
        return table.filter(pc.is_null(table["error_code"]) if self._only == "ok" else pc.is_valid(table["error_code"]))


def _write_table(rows: _Rows, options: ExportOptions, stream: IO[bytes], report: ExportReport) -> None:
    with _writing(options.path), _sink(options, stream, rows.schema) as sink:
        for table in rows.tables():
            sink.write(table)
            report.rows += table.num_rows


def _sink(options: ExportOptions, stream: IO[bytes], schema: pa.Schema) -> AbstractContextManager[RowSink]:
    if options.format == "parquet":
        return RowGroupWriter(stream, schema, _ROWS_PER_GROUP)
    return nullcontext(JsonlSink(stream) if options.format == "jsonl" else CsvSink(stream, schema))


def _write_lines(
    rows: _Rows, record: RunRecord, options: ExportOptions, streams: dict[Path, IO[bytes]], report: ExportReport
) -> None:
    created = int(datetime.fromisoformat(record.created).timestamp())
    job = record.job
    maker = LineMaker(record.run_id, job["model"], created, rows.id_column, job["sampling"], task=_lines_of(record))

    def output_rows() -> Iterator[dict[str, Any]]:
        for table in rows.tables():
            report.rows += table.num_rows
            yield from readable_rows(_with_text_ids(_as_asked(table), rows.id_column))

    for lines in maker.lines(output_rows()):
        _write_pair(lines, options, streams, report)


def _as_asked(table: pa.Table) -> pa.Table:
    """Lines as the run reads them: many writers mark no text as text."""
    for name in {*_OF_PAIRS} & {*table.schema.names}:
        read, _ = with_text(pa.RecordBatch.from_arrays([table[name].combine_chunks()], [name]))
        table = table.set_column(table.schema.get_field_index(name), name, read.column(0))
    return table


def _with_text_ids(table: pa.Table, id_column: str | None) -> pa.Table:
    """Ids as the run itself writes them, whatever their type."""
    if id_column is None:
        return table
    ids = pa.array(id_texts(table[id_column], id_column), pa.string())
    return table.set_column(table.schema.get_field_index(id_column), id_column, ids)


def _write_pair(
    lines: BatchLines, options: ExportOptions, streams: dict[Path, IO[bytes]], report: ExportReport
) -> None:
    if lines.output is not None:
        with _writing(options.path):
            streams[options.path].write(json_line(lines.output))
        report.output_lines += 1
    if lines.error is not None:
        with _writing(options.error_file):
            streams[options.error_file].write(json_line(lines.error))
        report.error_lines += 1


def _writing(path: Path) -> AbstractContextManager[None]:
    """Report a failing disk by name; a reader of stdout that went away is not an error."""
    return nullcontext() if path == STDOUT else disk_errors("writing", path)
