"""Commands about a run: how far it is, what failed, what came out, whether it is whole. RUN is the output directory."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bulkrun.cli.output import (
    cell_text,
    count,
    counted,
    duration,
    echo_json,
    json_option,
    note,
    print_facts,
    print_json,
    print_table,
    takes_unicode,
)
from bulkrun.cli.run_path import RunPath
from bulkrun.cli.summary import facts_of
from bulkrun.errors import UsageError

if TYPE_CHECKING:
    from bulkrun.job.store.run_dir import RunDir
    from bulkrun.job.views.listing import DamagedRun
    from bulkrun.job.views.status import RunStatus

_LINES_PER_CELL = 3  # of a table that `query` shows
_run_argument = click.argument("run", type=RunPath())


@click.command()
@_run_argument
@click.option("--metrics", is_flag=True, help="In Prometheus' text format, for node_exporter's textfile collector.")
@json_option
def status(run: RunDir, metrics: bool, as_json: bool) -> None:
    """Show the progress of RUN: rows, speed, time left, workers.

    Only reads files, so it works from any terminal or node.
    """
    from bulkrun.job.views.metrics import metrics_text
    from bulkrun.launch.runs.control import status_with_queue

    if metrics and as_json:
        raise UsageError("--metrics or --json, not both")
    found, queue = status_with_queue(run)
    if metrics:
        click.echo(metrics_text(found), nl=False)
    elif as_json:
        print_json({**asdict(found), "queue": [asdict(job) for job in queue]})
    else:
        _print_status(found, queue)


def _print_status(found: RunStatus, queue: Sequence[Any]) -> None:
    shards = "?" if found.shards_total is None else found.shards_total
    facts = {**facts_of(found), "shards": f"{found.shards_committed} of {shards} committed"}
    if found.state == "running":
        facts["speed"] = f"{found.rows_per_s:,.1f} rows/s, {count(found.tokens_per_s)} tok/s, "
        facts["speed"] += f"{duration(found.eta_s)} left"
    if found.update is not None:
        rows = count(found.update.rows_total) if found.update.rows_total is not None else "?"
        facts["update"] = f"{found.update.state}: {count(found.update.rows_done)} of {rows} rows"
        facts["update"] += f" ({found.update.message})" if found.update.message else ""
    if found.last_commit_age_s is not None:
        facts["last commit"] = f"{duration(found.last_commit_age_s)} ago"
    live = [worker for worker in found.workers if worker.alive]
    facts["workers"] = ", ".join(f"{worker.role} {worker.id} (process {worker.pid})" for worker in live) or "none"
    for job in queue:
        facts[f"Slurm {job.job_id}"] = f"{job.state} {job.node or job.reason}"
    facts["next"] = found.next_command
    print_facts(facts)


@click.command()
@_run_argument
@click.option(
    "-n", "--examples", default=3, show_default=True, type=click.IntRange(1), help="Rows to show for each code."
)
@json_option
def errors(run: RunDir, examples: int, as_json: bool) -> None:
    """Show the error rows of RUN: how many there are of each code, with examples."""
    from bulkrun.job.store.run_record import read_record
    from bulkrun.job.views.row_errors import read_row_errors

    read_record(run)
    report = read_row_errors(run, examples=examples)
    if as_json:
        print_json(asdict(report))
        return
    if not report.counts:
        note(f"{run.root}: no error rows")
        return
    print_table(["code", "rows"], report.counts.items())
    shown = [error for some in report.examples.values() for error in some]
    named = ["id"] if any(error.id is not None for error in shown) else []
    sampled = ["sample"] if any(error.sample for error in shown) else []
    columns = ["row", *named, *sampled, "code", "message"]
    print_table(columns, [[getattr(error, column) for column in columns] for error in shown])


@click.command()
@_run_argument
@click.argument("sql")
@click.option("--csv", "as_csv", is_flag=True, help="CSV on stdout.")
@click.option(
    "--limit",
    default=1000,
    show_default=True,
    type=click.IntRange(1, 10**9),
    help="Maximum number of rows; whether there are more is said on stderr, and in `truncated` of --json.",
)
@click.option("--full", is_flag=True, help=f"Show long cells whole, not only their first {_LINES_PER_CELL} lines.")
@json_option
def query(run: RunDir, sql: str, as_csv: bool, limit: int, full: bool, as_json: bool) -> None:
    """Query the results of RUN with DuckDB, even while it runs.

    The view is `results`; one SELECT, read-only. The table clips long cells; --csv and --json never do.
    """
    from bulkrun.data.results.export_files import json_text, readable_rows
    from bulkrun.data.results.query import run_query
    from bulkrun.job.store.run_record import read_record
    from bulkrun.job.views.export_schema import schema_without_rows

    if as_csv and as_json:
        raise UsageError("--csv or --json, not both")
    read_record(run)
    table = run_query(run.root, sql, limit=limit + 1, schema=schema_without_rows(run))
    truncated = table.num_rows > limit
    if truncated:
        note(f"only the first {counted(limit, 'row')}; --limit shows more")
        table = table.slice(0, limit)
    rows = readable_rows(table)
    if as_json:
        found = {"columns": table.column_names, "rows": rows, "truncated": truncated}
        echo_json(json_text(found, ascii_only=not takes_unicode()))
    elif as_csv:
        _echo_csv(table.column_names, rows)
    else:
        nested = (dict, list)  # as --json and DuckDB's own casts have them, not as Python does
        shown = [[json_text(cell) if isinstance(cell, nested) else cell for cell in row.values()] for row in rows]
        print_table(table.column_names, shown, max_lines=None if full else _LINES_PER_CELL)


def _echo_csv(columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> None:
    """On stdout, as `export` writes it: a file for programs."""
    from bulkrun.data.results.export_files import csv_cell

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    writer = csv.writer(sys.stdout)
    writer.writerow(columns)
    writer.writerows([csv_cell(cell) for cell in row.values()] for row in rows)


@click.command()
@_run_argument
@json_option
def verify(run: RunDir, as_json: bool) -> None:
    """Check RUN: every checksum, every row exactly once, all totals, its bucket. Exits 1 if something is wrong."""
    from bulkrun.job.views.verify import verify_run

    report = verify_run(run)
    if as_json:
        print_json(asdict(report))
    else:
        for problem in report.problems:
            click.echo(cell_text(problem))
        state = "finished" if report.finished else "not finished"
        verdict = counted(len(report.problems), "problem") if report.problems else "all is well"
        note(f"{run.root} ({state}): {counted(report.parts, 'part')}, {counted(report.rows, 'row')} read: {verdict}")
    sys.exit(0 if report.ok else 1)


def _minute_of(run: RunStatus | DamagedRun) -> str | None:
    """When it was created, in a cell that 80 columns need not fold: 2026-11-26 07:47Z."""
    created = getattr(run, "created", None)
    return None if created is None else f"{created[:16].replace('T', ' ')}Z"


@click.command("list")
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False), default=Path())
@json_option
def list_runs(folder: Path, as_json: bool) -> None:
    """List the runs in FOLDER (default: here) and below."""
    from bulkrun.job.views.listing import DamagedRun
    from bulkrun.launch.runs.control import statuses_with_queue

    found = statuses_with_queue(folder)
    if as_json:
        print_json({"runs": [asdict(run) for run in found]})
        return
    columns = ["name", "state", "rows_done", "rows_total", "error_rows"]
    rows = [[str(run.root), *(getattr(run, name, None) for name in columns), _minute_of(run)] for run in found]
    print_table(["run", "job", "state", "done", "rows", "errors", "created"], rows)
    for run in found:
        if isinstance(run, DamagedRun):
            note(run.message)
