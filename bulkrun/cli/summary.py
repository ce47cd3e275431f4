"""What `submit` and its kin say, on stderr, of a run that ended."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from bulkrun.cli.output import count, counted, duration, note

MADE = {"generate": "generation", "embed": "vector", "classify": "label"}

if TYPE_CHECKING:
    from bulkrun.job.store.run_record import RunRecord
    from bulkrun.job.store.run_totals import RunTotals
    from bulkrun.job.views.status import RunStatus
    from bulkrun.launch.runs.run import Submitted


RANDOM_WEIGHTS = "random weights (engine.load_format: dummy): the text is noise, only speed can be measured"


def facts_of(found: RunStatus) -> dict[str, str]:
    """What `status` and `report` both say of a run."""
    total = "? (still planning)" if found.rows_total is None else count(found.rows_total)
    out = f", {count(found.completion_tokens)} out" if found.task == "generate" else ""
    each = f" ({found.samples} samples of each)" if found.samples > 1 else ""
    facts = {
        "run": f"{found.root} ({found.name})",
        "state": found.state + (f": {found.message}" if found.message else ""),
        "rows": f"{count(found.rows_done)} of {total}{each}, {count(found.error_rows)} with errors",
        "tokens": f"{count(found.prompt_tokens)} in{out} (committed)",
    }
    if found.random_weights:
        facts["model"] = RANDOM_WEIGHTS
    if found.cut:
        facts["cut"] = f"{counted(found.cut, 'output')} cut at max_tokens or the model's length"
    if found.duplicate_ids:
        facts["duplicate ids"] = f"{counted(found.duplicate_ids, 'row')} with the id of an earlier row"
    return facts


def print_summary(done: Submitted, anew: str) -> None:
    """What came of a run: rows, tokens, what to look at, where the results are.

    `anew` says how this command runs a finished run again, where it can.
    """
    from bulkrun.job.store.run_record import read_record
    from bulkrun.job.views.status import first_look

    if done.changes:
        note(_changes(done.changes))
    if not done.worked:
        _print_idle(done, anew)
        return
    totals, record, root = done.totals, read_record(done.run), shlex.quote(str(done.run.root))
    tokens = f"{count(totals.prompt_tokens)} tokens in"
    tokens += f", {count(totals.completion_tokens)} out" if record.task == "generate" else ""
    rows = counted(totals.rows, "row") + (f" x {totals.samples} samples" if totals.samples > 1 else "")
    note(f"{totals.status}: {rows} in {duration(done.elapsed_s)} ({tokens})")
    _print_remarks(done, record, root)
    deep = "" if all(path.parent == done.run.root for path in done.run.parts().values()) else "**/"
    note(f"results  {shlex.quote(_results_place(done, record))}/{deep}*.parquet ({counted(totals.parts, 'part')})")
    note(f"next     {first_look(root, record)}")


def _print_idle(done: Submitted, anew: str) -> None:
    """Of a run that had nothing to run."""
    from bulkrun.job.update.staging import update_under_way
    from bulkrun.job.views.status import read_status

    root = shlex.quote(str(done.run.root))
    note(f"{root} {_said_of_idle(done)} ({done.totals.status}).{anew}")
    if "unchanged" in (done.changes or {}) and (failed := sum(done.totals.errors.values())):
        what = counted(failed, f"failed {_answer(done.totals)}")
        note(f"  {what} will run again only when the input changes: bulkrun errors {root}")
    if update_under_way(done.run) is not None:
        note(f"next     {read_status(done.run).next_command} (of a retry or an incremental night under way)")


def _print_remarks(done: Submitted, record: RunRecord, root: str) -> None:
    """What to know of the results before they are used."""
    from bulkrun.data.storage.durable import read_json

    totals = done.totals
    if not totals.rows:
        note("  the input has no rows")
    if record.has_random_weights:
        note(f"  warning: {RANDOM_WEIGHTS}")
    if what := saved(totals, MADE[record.task]):
        note(f"  {what}")
    if totals.cut:
        was = "was" if totals.cut == 1 else "were"
        note(
            f"  {counted(totals.cut, 'output')} {was} cut at max_tokens or the model's length (finish_reason "
            f"'length'): raise {_what_cut(done, record)}, or shorten prompts"
        )
    for code, rows_with in totals.errors.items():
        note(f"  {counted(rows_with, _answer(totals))} failed with {code}: bulkrun errors {root}")
    if done.changes is None:
        planned = read_json(done.run.plan_complete) or {}
        warn_of_duplicates(planned.get("duplicate_ids", {}))
        warn_of_undeclared(planned.get("undeclared_columns", {}))


def _what_cut(done: Submitted, record: RunRecord) -> str:
    """The keys whose numbers cut outputs. What a row or a line of a batch sets itself, the job's does not raise."""
    from bulkrun.job.jobfile.spec import JobSpec
    from bulkrun.job.prompts.detect import has_mapping
    from bulkrun.job.views.export_schema import declared_schema

    spec, own = JobSpec.model_validate(record.job), ""
    if (column := spec.sampling.per_row.get("max_tokens")) is not None:
        own = f" (for rows with a value in {column!r}: that)"
    elif not has_mapping(spec.prompt) and "custom_id" in declared_schema(done.run).names:
        own = " (for lines with their own: that)"
    budget = "" if spec.run.max_tokens_per_row is None else " or run.max_tokens_per_row"
    return f"sampling.max_tokens{own}{budget}"


def _answer(totals: RunTotals) -> str:
    """What failures are counted in: where a row has several answers, it may fail in some of them."""
    return "sample" if totals.samples > 1 else "row"


def _said_of_idle(done: Submitted) -> str:
    """What was there to do where no row was to be run."""
    from bulkrun.job.store.run_record import read_record

    if done.uploaded is not None:
        parts = f"{count(done.uploaded)} of {counted(done.totals.parts, 'part')}"
        return (
            f"is already finished; {parts} and _SUCCESS were uploaded to {_results_place(done, read_record(done.run))}"
        )
    return "is already finished, nothing to do" if done.changes is None else "has nothing to run"


def _changes(changes: dict[str, int]) -> str:
    """What was to run and why; of a retry only that the rows failed before, not how they ended now."""
    if changes.keys() == {"failed"}:
        return f"rows: {count(changes['failed'])} that had failed before"
    return f"rows: {counted_changes(changes)}"


def counted_changes(changes: dict[str, int]) -> str:
    """How an input differs from the results, as in '2 new, 0 changed'."""
    return ", ".join(f"{count(rows)} {name.replace('_', ' ')}" for name, rows in changes.items())


def warn_of_duplicates(found: dict[str, Any]) -> None:
    """Ids that repeat: `found` is what the plan says of them."""
    if not found.get("count"):
        return
    shown = "; ".join(f"{each['id']!r} in rows {', '.join(map(str, each['rows']))}" for each in found["examples"])
    have = "has" if found["count"] == 1 else "have"
    note(f"  {counted(found['count'], 'row')} {have} the id of an earlier row ({shown}): `row` tells them apart")


def warn_of_undeclared(columns: dict[str, int]) -> None:
    """Columns that came too late to be in the output."""
    from bulkrun.job.plan.report import undeclared_lines

    for line in undeclared_lines(columns):
        note(f"  {line}")


def _results_place(done: Submitted, record: RunRecord) -> str:
    """The directory or the bucket that other tools read the results from."""
    path = str(record.job["output"]["path"]).rstrip("/")
    return path if path.startswith("s3://") else str(done.run.root)


def saved(totals: RunTotals, made: str = "generation") -> str:
    """What the run did not have to compute, in words; empty when there is nothing to say. `made` is what a row gets."""
    parts = {
        (made, "shared with another row"): totals.saved_generations,
        ("prompt token", "found in the prefix cache"): totals.cached_tokens,
        ("output", "stopped early (repetition, timeout)"): totals.stopped,
    }
    return ", ".join(f"{counted(number, noun)} {what}" for (noun, what), number in parts.items() if number)
