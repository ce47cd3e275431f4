"""Commands about workers that run somewhere: watch them, read what they said, make them stop."""

from __future__ import annotations

import sys
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import click

from bulkrun.cli.output import cell_text, json_option, note, print_json
from bulkrun.cli.run_path import RunPath
from bulkrun.errors import UsageError

if TYPE_CHECKING:
    from bulkrun.job.store.run_dir import RunDir

_LOOK_EVERY_S = 1.0
_run_argument = click.argument("run", type=RunPath())


@click.command()
@_run_argument
def watch(run: RunDir) -> None:
    """Show the progress of RUN live, until it is finished or no worker is left. From any terminal or node.

    Ctrl-C stops watching, not the run.
    """
    from bulkrun.cli.live import make_view
    from bulkrun.job.views.watch import watch_run
    from bulkrun.launch.runs.control import status_with_queue

    view = make_view(quiet=False)
    with suppress(KeyboardInterrupt), closing(view):  # its documented end
        for snapshot in watch_run(run):
            view.update(snapshot)
            time.sleep(_LOOK_EVERY_S)
    found, _ = status_with_queue(run)
    note(f"{run.root}: {found.state}{f': {found.message}' if found.message else ''}")
    note(f"next     {found.next_command}")


@click.command()
@_run_argument
@click.option("-n", "--lines", default=20, show_default=True, type=click.IntRange(1), help="Lines to show of each log.")
@click.option("-f", "--follow", is_flag=True, help="Keep showing new events, until Ctrl-C.")
@json_option
def logs(run: RunDir, lines: int, follow: bool, as_json: bool) -> None:
    """What happened in RUN and what its workers said.

    First its events, then the end of each worker's log.
    """
    from bulkrun.job.store.run_record import read_record
    from bulkrun.job.views.logs import event_line, follow_events, last_events, worker_logs

    if as_json and follow:
        raise UsageError("--json prints one object, and --follow never ends: leave one of the two out")
    read_record(run)
    if as_json:
        print_json({"events": last_events(run, lines), "logs": dict(worker_logs(run, lines))})
        return
    for line in map(event_line, last_events(run, lines)):
        click.echo(cell_text(line))
    for name, tail in worker_logs(run, lines):
        click.secho(f"\n{name}", bold=True)
        for line in tail:
            click.echo(cell_text(line))
    if follow:
        with suppress(KeyboardInterrupt):  # its documented end
            for line in follow_events(run):
                click.echo(cell_text(line))
                sys.stdout.flush()


@click.command()
@_run_argument
@json_option
def cancel(run: RunDir, as_json: bool) -> None:
    """Make every worker of RUN save and stop.

    Reaches all nodes and those that are still starting, and takes its jobs out of Slurm's queue. Nothing that was
    finished is lost; submitting the job again continues it.
    """
    from bulkrun.launch.runs.control import cancel_run

    stopped = cancel_run(run)
    if as_json:
        print_json(vars(stopped))
        return
    told = {"workers": stopped.workers, "Slurm jobs": stopped.slurm_jobs}
    for name, ids in told.items():
        if ids:
            note(f"{name}: {', '.join(ids)}")
    nobody = (
        "the run is finished" if stopped.finished else "no worker is running; a submit that is just starting will stop"
    )
    if stopped.silent:
        note(f"no recent heartbeat; may stop late or not at all: {', '.join(stopped.silent)}")
    heard = len(stopped.workers) > len(stopped.silent) or stopped.slurm_jobs
    if heard or not stopped.silent:
        note("they will save and stop within seconds" if heard else nobody)
