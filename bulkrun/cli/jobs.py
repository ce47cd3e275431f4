"""Commands about a job file: run it, help to run it, check it, plan it, try it."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from bulkrun.cli.foresight import json_of_probe, print_plan, print_probe, print_row
from bulkrun.cli.output import json_option, note, print_facts, print_json
from bulkrun.cli.run_path import RunPath
from bulkrun.cli.summary import RANDOM_WEIGHTS, counted_changes, print_summary
from bulkrun.errors import UsageError

if TYPE_CHECKING:
    from bulkrun.job.jobfile.spec import JobSpec
    from bulkrun.job.store.run_dir import RunDir
    from bulkrun.launch.runs.queue import Queued
    from bulkrun.launch.runs.run import Submitted, View

_Command = Callable[..., Any]


def _job_options(command: _Command) -> _Command:
    """JOB and --set, the parameters of every command about a job file."""
    command = click.option(
        "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key: --set sampling.temperature=0.7"
    )(command)
    return click.argument("job", type=click.Path(path_type=Path))(command)


def _running_options(command: _Command) -> _Command:
    """The options of every command that works on a run in the foreground."""
    command = click.option("-q", "--quiet", is_flag=True, help="Say nothing on success (for cron).")(command)
    shown = (
        "Number of workers: processes on this machine (one per GPU), Slurm array elements or Ray actors. Default: "
        "run.workers."
    )
    command = click.option("--workers", type=click.IntRange(1, 1024), metavar="N", help=shown)(command)
    return json_option(command)


def _load(job: Path, overrides: tuple[str, ...]) -> JobSpec:
    from bulkrun.job.jobfile.load import load_job

    return load_job(job, overrides)


def _located(job: Path, overrides: tuple[str, ...]) -> AbstractContextManager[None]:
    """Errors that name a key of the job say where in the file it is."""
    from bulkrun.job.jobfile.locate import located

    return located(job, overrides)


@click.command()
@_job_options
@click.option(
    "--fresh", is_flag=True, help="Start from the beginning: an earlier run there is moved aside, never deleted."
)
@click.option(
    "--resume-anyway", is_flag=True, help="Continue even though settings changed, where no result depends on them."
)
@click.option(
    "--full-refresh",
    is_flag=True,
    help="With run.incremental: run every row again. After a settings change: every row not yet run with the new "
    "settings.",
)
@click.option("--executor", type=click.Choice(["local", "slurm", "ray"]), help="Who starts the workers.")
@click.option("--wait", is_flag=True, help="With Slurm: wait until the run is finished.")
@_running_options
def submit(
    job: Path,
    overrides: tuple[str, ...],
    executor: str | None,
    wait: bool,
    fresh: bool,
    resume_anyway: bool,
    full_refresh: bool,
    workers: int | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Run JOB, or continue it where it stopped.

    A second submit of the same job joins the first one as another worker. A finished run is left alone;
    with run.incremental, rows that are new, changed or failed are run and put into it.
    """
    from bulkrun.launch.runs.submission import Submission
    from bulkrun.launch.runs.submit import submit_job

    given = {"run.workers": workers, "run.executor": executor}
    overrides = (*overrides, *(f"{key}={value}" for key, value in given.items() if value is not None))
    spec = _load(job, overrides)
    if wait and spec.run.executor != "slurm":
        raise UsageError(f"--wait is only for Slurm; with run.executor {spec.run.executor}, submit always waits")
    flags = {"fresh": fresh, "resume_anyway": resume_anyway, "full_refresh": full_refresh}
    asked = Submission(spec=spec, job_file=job, overrides=overrides, **flags)
    with _located(job, overrides):
        _run_and_end(lambda view: submit_job(asked, view, wait=wait), quiet, as_json, anew=" --fresh runs it again.")


@click.command()
@click.argument("run", type=RunPath())
@_running_options
def worker(run: RunDir, workers: int | None, quiet: bool, as_json: bool) -> None:
    """Work on RUN until it is finished, from this or another node.

    RUN is the output directory of a job that was submitted; paths in the job are relative to the directory in which
    that was done. Workers may join and leave at any time.
    """
    from bulkrun.launch.runs.run import join

    _run_and_end(lambda view: join(run.root, workers, view), quiet, as_json)


@click.command()
@click.argument("run", type=RunPath())
@click.option("--failed", is_flag=True, required=True, help="Run the rows that failed again.")
@click.option("--code", "codes", multiple=True, metavar="CODE", help="Only those with this code (may be repeated).")
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a setting: --set sampling.max_tokens=512"
)
@click.option("--discard", is_flag=True, help="Discard another retry or update that is under way.")
@_running_options
def retry(
    run: RunDir,
    failed: bool,
    codes: tuple[str, ...],
    overrides: tuple[str, ...],
    discard: bool,
    workers: int | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Run the failed rows of RUN again and put the answers in their places.

    RUN is a finished run. A row that fails again gets the newer error. The same command continues an interrupted
    retry.
    """
    from bulkrun.launch.runs.retry import retry as retry_run

    assert failed, "click requires it"

    def work(view: View) -> Submitted:
        return retry_run(run.root, view, overrides=overrides, codes=codes, begin_anew=discard, workers=workers)

    _run_and_end(work, quiet, as_json)


def _run_and_end(run: Callable[[View], Submitted | Queued], quiet: bool, as_json: bool, *, anew: str = "") -> NoReturn:
    """Show a run while it goes on and what came of it, and end with its exit code.

    `anew` says how this command runs a finished run again, where it can.
    """
    from bulkrun.cli.live import make_view
    from bulkrun.job.store.run_record import read_record
    from bulkrun.launch.runs.run import Submitted

    view = make_view(quiet)
    try:
        done = run(view)
    finally:
        view.close()
    if not isinstance(done, Submitted):
        _say_where(done, quiet, as_json)
    if as_json:
        noise = read_record(done.run).has_random_weights
        facts = {"worked": done.worked, "uploaded": done.uploaded, "changes": done.changes, "random_weights": noise}
        print_json({"run": str(done.run.root), **facts, **vars(done.totals)})
    elif not quiet or done.exit_code:
        print_summary(done, anew)
    sys.exit(done.exit_code)


def _say_where(queued: Queued, quiet: bool, as_json: bool) -> NoReturn:
    root = shlex.quote(str(queued.run.root))
    if as_json:
        print_json({"run": str(queued.run.root), "job_id": queued.job_id, "new": queued.new})
    elif not quiet:
        note(f"Slurm job {queued.job_id} {'is in the queue' if queued.new else 'was already in the queue'}")
        if queued.standing:
            note(queued.standing)
        note(f"next     bulkrun status {root} (or watch, logs, cancel); the same command again continues the run")
    sys.exit(0)


@click.command()
@_job_options
@json_option
def validate(job: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Check JOB, its input, model and prompt without running anything."""
    from bulkrun.launch.runs.preview import check_job

    with _located(job, overrides):
        spec = _load(job, overrides)
        facts = check_job(spec)
    print_json({"ok": True, **facts}) if as_json else print_facts(facts)
    if spec.engine.load_format == "dummy":
        note(f"warning: {RANDOM_WEIGHTS}")
    note(f"{job}: ok")


@click.command()
@_job_options
@click.option(
    "--probe",
    type=click.FloatRange(1, 3600),
    metavar="SECONDS",
    help="Also run some of the rows for about so long, and estimate the time of the whole job on this machine.",
)
@json_option
def plan(job: Path, overrides: tuple[str, ...], probe: float | None, as_json: bool) -> None:
    """Show what JOB would do: rows, tokens, duplicates, prefixes, shards, memory.

    Writes nothing, and without --probe runs nothing.
    """
    from bulkrun.launch.runs.preview import plan_job

    if probe is not None and math.isnan(probe):  # it is in click's range
        raise UsageError("--probe nan: not a number of seconds")
    with _located(job, overrides):
        spec = _load(job, overrides)
        report, changes, probed, memory = plan_job(spec, probe)
    noise = spec.engine.load_format == "dummy"
    if as_json:
        print_json(
            {
                **report.to_json(),
                "changes": changes,
                "memory": asdict(memory),
                "random_weights": noise,
                "probe": None if probed is None else json_of_probe(probed),
            }
        )
        return
    if noise:
        note(f"warning: {RANDOM_WEIGHTS}")
    if changes is not None:
        print_facts({"since the last run": counted_changes(changes)})
    print_plan(report, spec, memory)
    if probed is not None:
        click.echo()
        print_probe(probed, spec)
    elif probe is not None:
        note("probe: no row can run")


@click.command()
@_job_options
@click.option("-n", "--rows", default=5, show_default=True, type=click.IntRange(1, 1000), help="Number of rows.")
@json_option
def preview(job: Path, overrides: tuple[str, ...], rows: int, as_json: bool) -> None:
    """Run the first rows of JOB and show prompts and responses. Writes nothing."""
    from bulkrun.launch.runs.preview import preview_job

    with _located(job, overrides):
        shown = preview_job(_load(job, overrides), rows)
    if as_json:
        print_json({"rows": [row._asdict() for row in shown]})
        return
    for row in shown:
        print_row(row)
