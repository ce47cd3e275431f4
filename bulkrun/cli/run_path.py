"""RUN on a command line: a run's directory, or the `s3://` URL that its results go to."""

from __future__ import annotations

from pathlib import Path

import click


class RunPath(click.ParamType[Path]):
    """The run's directory; that of a URL is looked up (see `bulkrun.job.store.places`)."""

    name = "run"

    def convert(self, value: str | Path, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        from bulkrun.job.store.places import find_run

        return find_run(str(value)).root
