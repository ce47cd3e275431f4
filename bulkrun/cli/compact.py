"""`compact`: a finished run's many small files become few large ones."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from bulkrun.cli.output import count, counted, json_option, note, print_json
from bulkrun.cli.run_path import RunPath

if TYPE_CHECKING:
    from bulkrun.job.store.run_dir import RunDir


@click.command()
@click.argument("run", type=RunPath())
@click.option(
    "--rows-per-file",
    default=None,
    type=click.IntRange(1),
    help="Maximum number of input rows in a file. Default: a million, or 256 MiB before compression if that is less.",
)
@json_option
def compact(run: RunDir, rows_per_file: int | None, as_json: bool) -> None:
    """Rewrite RUN's parts as few large ones, rows in input order.

    For finished runs. Readers see each row once at every moment: a new directory takes the old one's place in one
    step. Needs room for a second copy of the results while it works.
    """
    from bulkrun.job.update.compact import DEFAULT_ROWS_PER_FILE
    from bulkrun.job.update.compact import compact as compact_run

    done = compact_run(run, rows_per_file or DEFAULT_ROWS_PER_FILE)
    if as_json:
        print_json(asdict(done))
    elif not done.worked:
        note(f"{run.root}: already compacted ({counted(done.parts_after, 'part')}, {counted(done.rows, 'row')})")
    else:
        parts = f"{counted(done.parts_before, 'part')} became {count(done.parts_after)}"
        note(f"{run.root}: {parts} ({counted(done.rows, 'row')})")
