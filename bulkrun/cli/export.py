"""The command that writes a run's results as one file for other programs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from bulkrun.cli.output import count, counted, note
from bulkrun.cli.run_path import RunPath
from bulkrun.errors import UsageError

if TYPE_CHECKING:
    from bulkrun.job.store.run_dir import RunDir

_FORMATS = ["openai", "jsonl", "csv", "parquet"]


@click.command()
@click.argument("run", type=RunPath())
@click.option("--format", "format_", type=click.Choice(_FORMATS), required=True, help="What to write.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default=Path("-"), help="The file. Default, and -: stdout."
)
@click.option(
    "--errors",
    "errors_path",
    type=click.Path(path_type=Path),
    help="openai: the file of the error lines. Default: NAME.errors.jsonl beside NAME.jsonl; with -o -, stdout too.",
)
@click.option(
    "--only", type=click.Choice(["all", "ok", "errors"]), default="all", show_default=True, help="Which rows."
)
@click.option("--partial", is_flag=True, help="Export an unfinished RUN too: what is committed so far.")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def export(
    run: RunDir,
    format_: Literal["openai", "jsonl", "csv", "parquet"],
    output: Path,
    errors_path: Path | None,
    only: Literal["all", "ok", "errors"],
    partial: bool,
    force: bool,
) -> None:
    """Write the results of RUN to one file, in input order.

    openai writes the output and error files of OpenAI's batch format. CSV cells that a spreadsheet would take for
    formulas are prefixed with a quote; lists and structs are JSON text there.
    """
    from bulkrun.job.views.export import export_run
    from bulkrun.job.views.export_target import STDOUT, ExportOptions

    options = ExportOptions(format_, output, errors_path, only, partial, force)
    if format_ == "parquet" and output == STDOUT and sys.stdout.isatty():
        raise UsageError("Parquet is not for terminals; name a file with -o")
    done = export_run(run, options, sys.stdout.buffer)
    sys.stdout.buffer.flush()
    if not done.finished:
        verb = "is" if done.missing == 1 else "are"
        missing = f"rows {verb}" if done.missing is None else f"{counted(done.missing, 'row')} {verb}"
        note(f"{run.root} is not finished: {missing} missing here (`bulkrun status {run.root}`)")
    lines = f": {count(done.output_lines)} output and {count(done.error_lines)} error lines"
    note(counted(done.rows, "row") + (lines if format_ == "openai" else ""))
    for path in options.targets:
        note(f"wrote    {path}")
