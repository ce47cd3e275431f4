"""`init`: a job file to start from."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from bulkrun.cli.output import note
from bulkrun.errors import BulkrunError
from bulkrun.settings import Task


@click.command()
@click.argument("source", metavar="INPUT")
@click.option(
    "--task",
    type=click.Choice(["generate", "embed", "classify"]),
    default="generate",
    show_default=True,
    help="What becomes of a row: a text, a vector, or a label with scores.",
)
@click.option(
    "--column",
    "columns",
    multiple=True,
    metavar="NAME",
    help="The column with the text; two with --task classify are a pair (query and document); else several are put "
    "together. Default: the one that looks right.",
)
@click.option(
    "--model", help="A directory or a hub id. Default: bundled:tiny; with --task classify, for you to fill in."
)
@click.option("--delimiter", help=r"The character between the fields of CSV files, as in input.delimiter; \t is a tab.")
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), help="The file to write; -: stdout. Default: job.yaml."
)
def init(
    source: str, task: Task, columns: tuple[str, ...], model: str | None, delimiter: str | None, out: Path | None
) -> None:
    """Write a job file over INPUT: a file, a directory, a glob.

    INPUT is what input.path may be. Its columns are listed in the file, which runs as it is, with the
    bundled model; one that classifies needs the name of a model first.

    \b
    bulkrun init docs.parquet --task embed
    bulkrun init pairs.parquet --task classify --column query --column document
    bulkrun init score_requests.jsonl --task classify
    """
    from bulkrun.launch.init_job import make_job, write_job
    from bulkrun.launch.init_prompt import Wanted

    job, wanted = out or Path("job.yaml"), Wanted(task, columns, model, "\t" if delimiter == r"\t" else delimiter)
    with _options_named():
        if job == Path("-"):
            sys.stdout.buffer.write(make_job(source, Path("job.yaml"), wanted).encode())
            sys.stdout.buffer.flush()
            return
        write_job(source, job, wanted)
    name = shlex.quote(str(job))
    note(f"wrote    {name}")
    first = f"write the model's name into {name} (model:); then " if wanted.lacks_model else ""
    note(f"next     {first}bulkrun preview {name}; then bulkrun submit {name}")


@contextmanager
def _options_named() -> Iterator[None]:
    """Errors that name the key of a job file, which is not there yet, name the option that gives it."""
    try:
        yield
    except BulkrunError as error:
        said = str(error).replace('input.delimiter: "', '--delimiter "')
        error.args = (said.replace("input.delimiter", "--delimiter"),)
        raise
