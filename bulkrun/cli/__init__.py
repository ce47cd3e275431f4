"""The commands: an option, one library call, a table or JSON. Imports nothing heavy until a command runs."""

from __future__ import annotations

import shlex
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

import click

from bulkrun import __version__
from bulkrun.cli.bench import bench
from bulkrun.cli.compact import compact
from bulkrun.cli.control import cancel, logs, watch
from bulkrun.cli.export import export
from bulkrun.cli.init import init
from bulkrun.cli.jobs import plan, preview, retry, submit, validate, worker
from bulkrun.cli.machine import doctor, models
from bulkrun.cli.report import report
from bulkrun.cli.runs import errors, list_runs, query, status, verify
from bulkrun.cli.schema import schema
from bulkrun.cli.streams import drop_stdout, no_bars_without_terminal, reader_is_gone, repair_streams
from bulkrun.data.storage.durable import ADVICE
from bulkrun.errors import BulkrunError, RunError

_TOPICS: dict[str, tuple[click.Command, ...]] = {
    "Run a job": (init, submit, worker, cancel, retry, validate, plan, preview, schema),
    "Look at a run": (status, watch, report, logs, errors, query, export, verify, compact, list_runs),
    "This machine": (models, doctor, bench),
}

_EXIT_CODES = """\b
Exit codes:
  0   all rows ok                    4    job or input changed under a resume
  1   failed                         75   interrupted and saved: run it again
  2   usage, job file or input       130  second Ctrl-C: stopped at once
  3   finished, some rows have       143  second SIGTERM: stopped at once
      errors
A command that only reads stops at the first signal (130, 143)."""


class _Topics(click.Group):
    """A group whose help lists the commands by topic, and which ends a `BulkrunError` with its exit code."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for topic, commands in _TOPICS.items():
            with formatter.section(topic):
                formatter.write_dl([(c.name or "", c.get_short_help_str(limit=76)) for c in commands])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BulkrunError as error:
            if ctx.params.get("debug"):
                traceback.print_exc()
            _end(error)
        except BrokenPipeError as error:
            if not reader_is_gone():
                raise RunError(f"a connection was lost ({error}); what is finished is saved") from error
            drop_stdout()
            sys.exit(141)
        except KeyboardInterrupt:
            click.echo(err=True)  # the terminal has shown ^C
            sys.exit(130)


def _end(error: BulkrunError) -> NoReturn:
    prefix = "" if error.exit_code == 75 else "error: "
    for line in filter(str.strip, str(error).splitlines()):  # DuckDB puts a blank one before what it points at
        click.echo(f"{prefix}{line}", err=True)
    sys.exit(error.exit_code)


def _print_version(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"bulkrun {__version__}")
        ctx.exit()


@click.group(cls=_Topics, epilog=_EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show it.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(debug: bool) -> None:
    """Offline bulk LLM inference: one YAML file, one command, every row exactly once.

    \b
    bulkrun submit jobs/summarize.yaml       run it; the same command resumes it
    bulkrun query out/summaries "SELECT response FROM results LIMIT 5"
    """


for _commands in _TOPICS.values():
    for _command in _commands:
        main.add_command(_command)


def run() -> None:
    """Entry point: a reader that went away (`bulkrun ... | head`) is not an error, a full disk behind stdout is one."""
    repair_streams()
    no_bars_without_terminal()
    try:
        try:
            main(prog_name="bulkrun")
        finally:
            sys.stdout.flush()
    except BulkrunError as error:
        _end(error)
    except BrokenPipeError:
        drop_stdout()
        sys.exit(141)
    except OSError as error:
        if "--debug" in sys.argv:
            traceback.print_exc()
        drop_stdout()
        where = f"{error.filename}: " if error.filename else ""
        click.echo(f"error: {where}{error.strerror or error}{_way_in(error) or _way_out(error)}", err=True)
        sys.exit(1)


def _way_in(error: OSError) -> str:
    """What to do about another user's run, whose state is that user's alone."""
    state = next((place for place in Path(str(error.filename)).parents if place.name == ".bulkrun"), None)
    if not isinstance(error, PermissionError) or state is None:
        return ""
    return (
        "; the state of a run is private, and only its owner can work on it. For the group to look at it once it is "
        f"finished, its owner types: chmod -R g+rX {shlex.quote(str(state))}"
    )


def _way_out(error: OSError) -> str:
    return "" if isinstance(error, PermissionError) or error.errno not in ADVICE else f"; {ADVICE[error.errno]}"
