"""`bulkrun report`: what became of a run, as tables, as JSON, or as one HTML page to keep beside the results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bulkrun.cli.output import (
    cell_text,
    count,
    counted,
    duration,
    json_option,
    note,
    print_facts,
    print_json,
    print_table,
)
from bulkrun.cli.run_path import RunPath
from bulkrun.cli.summary import MADE, RANDOM_WEIGHTS, saved

if TYPE_CHECKING:
    from bulkrun.job.store.run_dir import RunDir
    from bulkrun.job.views.report import RunReport
    from bulkrun.job.views.report_page import Table


@click.command()
@click.argument("run", type=RunPath())
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write it as one HTML page to this file.")
@json_option
def report(run: RunDir, html: Path | None, as_json: bool) -> None:
    """Say what became of RUN: rows, errors, lengths, speed, workers, what broke.

    Of what is committed so far, if it is not finished.
    """
    from bulkrun.job.views.report import read_report

    found = read_report(run)
    if html is not None:
        _write_page(found, html)
    if as_json:
        print_json(asdict(found))
    elif html is None:
        print_facts(_facts(found))
        for table in _tables(found):
            click.echo(f"\n{table.title}")
            print_table(table.columns, table.rows)


def _write_page(found: RunReport, path: Path) -> None:
    from bulkrun.data.storage.durable import disk_errors
    from bulkrun.job.views.report_page import chart_of_lengths, chart_of_timeline, page

    charts = [] if found.timeline is None else [chart_of_timeline(found.timeline)]
    charts += map(chart_of_lengths, found.lengths)
    title = f"{found.status.name}: {found.status.state}"
    text = page(title, _facts(found), charts, list(_tables(found)), visible=cell_text)
    with disk_errors("writing the report", path, "choose another place"):
        path.write_text(text, encoding="utf-8")
    note(f"written to {path}")


def _facts(found: RunReport) -> dict[str, str]:
    status, totals = found.status, found.status.totals
    total = "?" if status.rows_total is None else count(status.rows_total)
    facts = {
        "run": f"{status.root} ({status.run_id})",
        "job": " ".join([found.job_file or status.name, *(f"--set {override}" for override in found.overrides)]),
        "model": f"{found.model}, {RANDOM_WEIGHTS}" if status.random_weights else found.model,
        "state": status.state + (f": {status.message}" if status.message else ""),
        "rows": f"{count(status.rows_done)} of {total}, {count(status.error_rows)} with errors",
        "began": status.created,
        "at work": _time(found),
        "tokens": f"{count(status.prompt_tokens)} in"
        + (f", {count(status.completion_tokens)} out" if status.task == "generate" else ""),
    }
    if totals is not None and (what := saved(totals, MADE[status.task])):
        facts["saved"] = what
    if status.cut:
        facts["cut"] = f"{counted(status.cut, 'output')} cut at max_tokens"
    if status.duplicate_ids:
        facts["duplicate ids"] = f"{counted(status.duplicate_ids, 'row')} with the id of an earlier row"
    return facts | {"versions": ", ".join(f"{name} {version}" for name, version in found.versions.items())}


def _time(found: RunReport) -> str:
    """How long it was worked on, and what that is a second, unless later generations replaced rows."""
    status = found.status
    if not found.working_s or (status.totals is not None and status.totals.generation):
        return duration(found.working_s)
    rates = {"rows": status.rows_done, "prompt tokens": status.prompt_tokens, "output tokens": status.completion_tokens}
    each = ", ".join(f"{cell_text(number / found.working_s)} {name}/s" for name, number in rates.items() if number)
    return duration(found.working_s) + (f": {each}" if each else "")


def _tables(found: RunReport) -> Iterator[Table]:
    """Those that have rows."""
    from bulkrun.job.views.report_page import Table

    status, totals = found.status, found.status.totals
    yield from _if_any("How rows ended" if status.task == "generate" else "Labels", ["", "rows"], found.ends.items())
    columns = ["", "rows", "mean", "least", "median", "p90", "p99", "most"]
    lengths = [[one.column, *(getattr(one, name) for name in columns[1:])] for one in found.lengths]
    yield from _if_any("Lengths in tokens, of rows without an error", columns, lengths)
    yield from _if_any("Errors", ["code", "rows"], found.errors.counts.items())
    examples = [error for some in found.errors.examples.values() for error in some]
    rows = [[error.row, error.id, error.code, error.message] for error in examples]
    yield from _if_any("Some of them", ["row", "id", "code", "message"], rows)
    workers = [
        [one.id, one.role, "at work" if one.alive else one.ended or "killed", one.message] for one in status.workers
    ]
    yield from _if_any("Who worked", ["worker", "role", "ended", "why"], workers)
    yield from _if_any("What happened beside commits", ["event", "times"], found.events.items())
    if totals is not None and totals.updates:
        names = list(dict.fromkeys(name for update in totals.updates for name in update))
        yield Table("Later generations", names, [[update.get(name) for name in names] for update in totals.updates])


def _if_any(title: str, columns: list[str], rows: Any) -> Iterator[Table]:
    from bulkrun.job.views.report_page import Table

    if listed := [list(row) for row in rows]:
        yield Table(title, columns, listed)
