"""Commands about this machine: what it can run, and whether a run would work on it."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from bulkrun.cli.output import json_option, note, print_facts, print_json, print_table


@click.command()
@click.argument("name", required=False)
@json_option
def models(name: str | None, as_json: bool) -> None:
    """What models can be run, and how fast; with a NAME, whether that one can.

    NAME is a hub id, a local directory, or bundled:tiny.
    """
    from bulkrun.launch.model_list import describe_model, supported_models

    if name:
        facts = describe_model(name)
        print_json(facts) if as_json else print_facts(facts)
        return
    listing = supported_models()
    if as_json:
        print_json(listing)
        return
    print_table(["level", "architecture", "family", "notes"], [row.values() for row in listing["architectures"]])
    note("\nBundled, for trying things: " + ", ".join(listing["bundled"]))


@click.command()
@click.option(
    "--output", type=click.Path(path_type=Path), default=Path(), help="The directory that results would go to."
)
@json_option
def doctor(output: Path, as_json: bool) -> None:
    """Check this machine: packages, processor, GPU, disk. Exits 1 when a run would not work."""
    from bulkrun.launch.doctor import examine

    checks = examine(output)
    if as_json:
        print_json({"checks": [check._asdict() for check in checks]})
    else:
        print_table(["check", "state", "detail"], checks)
    sys.exit(1 if any(check.state == "fail" for check in checks) else 0)
