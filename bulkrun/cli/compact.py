"""`compact`: a finished run's many small files become few large ones."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from bulkrun.cli.output import count, json_option, note, print_json
from bulkrun.cli.run_path import RunPath

if TYPE_CHECKING:
    from bulkrun.job.store.run_dir import RunDir


@click.command()
@click.argument("run", type=RunPath())
@click.option(
    "--rows-per-file",
    default=None,
    type=click.IntRange(1),
    help="Most input rows in a file. Default: a million, or what is 256 MiB before compression.",
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
        note(f"{run.root}: compact already ({count(done.parts_after)} parts, {count(done.rows)} rows)")
    else:
        note(f"{run.root}: {count(done.parts_before)} parts became {count(done.parts_after)} ({count(done.rows)} rows)")
