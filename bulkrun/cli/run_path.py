"""RUN on a command line: a run's directory, or the `s3://` URL that its results go to, as a `RunDir`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from bulkrun.job.store.run_dir import RunDir

    ParamType = click.ParamType[RunDir]
else:
    ParamType = click.ParamType  # older clicks than 8.4 have it without a type


class RunPath(ParamType):
    """The run's directory; that of a URL is looked up (see `bulkrun.job.store.places`)."""

    name = "run"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> RunDir:
        from bulkrun.job.store.places import find_run

        return find_run(value)
