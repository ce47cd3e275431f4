"""`bulkrun report`: what became of a run, as tables, as JSON, or as one HTML page to keep beside the results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bulkrun.cli.output import (
    cell_text,
    duration,
    json_option,
    note,
    print_facts,
    print_json,
    print_table,
)
from bulkrun.cli.run_path import RunPath
from bulkrun.cli.summary import MADE, RANDOM_WEIGHTS, facts_of, saved

if TYPE_CHECKING:
    from bulkrun.job.store.run_dir import RunDir
    from bulkrun.job.views.report import RunReport

_Table = tuple[str, list[str], list[list[Any]]]  # its title, the names of its columns, its rows


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
        for title, columns, rows in _tables(found):
            click.echo(f"\n{title}")
            print_table(columns, rows)


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
    totals = found.status.totals
    model = found.model if not found.status.random_weights else f"{found.model}, {RANDOM_WEIGHTS}"
    facts = facts_of(found.status) | {
        "job": " ".join([found.job_file or found.status.name, *(f"--set {override}" for override in found.overrides)]),
        "model": model,
        "began": found.status.created,
        "at work": _time(found),
    }
    if totals is not None and (what := saved(totals, MADE[found.status.task])):
        facts["saved"] = what
    return facts | {"versions": ", ".join(f"{name} {version}" for name, version in found.versions.items())}


def _time(found: RunReport) -> str:
    """How long it was worked on, and what that is a second, unless later generations replaced rows."""
    status = found.status
    if not found.working_s or (status.totals is not None and status.totals.generation):
        return duration(found.working_s)
    rates = {"rows": status.rows_done, "prompt tokens": status.prompt_tokens, "output tokens": status.completion_tokens}
    each = ", ".join(f"{cell_text(number / found.working_s)} {name}/s" for name, number in rates.items() if number)
    return duration(found.working_s) + (f": {each}" if each else "")


def _tables(found: RunReport) -> Iterator[_Table]:
    """Those that have rows."""
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
    updates = [] if totals is None else totals.updates
    names = list(dict.fromkeys(name for update in updates for name in update))
    yield from _if_any("Later generations", names, [[update.get(name) for name in names] for update in updates])


def _if_any(title: str, columns: list[str], rows: Iterable[Sequence[Any]]) -> Iterator[_Table]:
    if listed := [list(row) for row in rows]:
        yield title, columns, listed
