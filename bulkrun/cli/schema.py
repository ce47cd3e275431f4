"""`schema`: the keys of a job file, for editors as JSON schema and for people as a table."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from bulkrun.cli.output import print_table
from bulkrun.errors import UsageError

if TYPE_CHECKING:
    from bulkrun.job.jobfile.reference import Key


@click.command()
@click.argument("section", required=False)
@click.option(
    "--format", "form", type=click.Choice(["json", "table", "md"]), help="Default: json; with SECTION, table."
)
def schema(section: str | None, form: str | None) -> None:
    """Describe the keys of a job file: types, defaults, meaning.

    \b
    bulkrun schema > job.schema.json         the JSON schema, for editors
    bulkrun schema sampling                  a section, for people
    bulkrun schema --format md               all of it, as Markdown
    """
    from bulkrun.job.jobfile.load import job_schema
    from bulkrun.job.jobfile.reference import Key, keys_below

    described = job_schema()
    form = form or ("json" if section is None else "table")
    if form == "json":
        if section is not None:
            raise UsageError("--format json is the schema of the whole file; leave SECTION out")
        click.echo(json.dumps(described, ensure_ascii=False, indent=2))
        return
    keys = keys_below(described, section)
    if form == "table":
        print_table(["key", "what it is"], [(key.key, _in_words(key)) for key in keys], whole_names=True)
        return
    for cells in (Key._fields, ["---"] * len(Key._fields), *keys):
        click.echo(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")


def _in_words(key: Key) -> str:
    """Type, default and description in one cell: beside each other they leave a terminal of 80 columns no room."""
    default = {"": "", "required": " (required)"}.get(key.default, f" (default {key.default})")
    return f"{key.type}{default}. {key.description}"
