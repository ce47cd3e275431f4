"""`init`: a job file to start from."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from bulkrun.cli.output import note


@click.command()
@click.argument("source", metavar="INPUT")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="The file to write. Default: job.yaml.")
def init(source: str, out: Path | None) -> None:
    """Write a job file over INPUT: a file, a directory, a glob.

    INPUT is what input.path may be. Its columns are listed in the file, which runs as it is, with the
    bundled model.
    """
    from bulkrun.launch.init_job import write_job

    job = out or Path("job.yaml")
    write_job(source, job)
    name = shlex.quote(str(job))
    note(f"wrote    {name}")
    note(f"next     bulkrun preview {name}; then bulkrun submit {name}")
