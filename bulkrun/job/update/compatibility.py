"""Whether an incremental run may go on with a job: what may differ from one night to the next, and what may not.

Knows records and schemas; reads no rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from bulkrun.data.results.parts import read_part_schema
from bulkrun.data.types.casts import can_cast, rounds
from bulkrun.data.types.nested import with_leaves
from bulkrun.errors import ResumeError
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.plan.result_columns import result_fields
from bulkrun.job.store.difference_lines import difference_lines
from bulkrun.job.store.fingerprint import ADAPTERS, HARMLESS, differences
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import RunRecord
from bulkrun.job.update.diff import Changes
from bulkrun.settings import Task

# The input of a night: which rows there are. What they say is in their keys.
_TODAY = (
    *("input.files", "input.path", "input.sql", "input.limit", "input.on_duplicate", "input.max_row_bytes"),
    *("input.delimiter", "input.adapter"),
)
_ADAPTERS_TODAY = f"model.{ADAPTERS}."  # each row's is in its key
# What makes results that cannot be compared with those of before, and what these are: of labels their names alone.
_APART: Mapping[Task, tuple[tuple[str, ...], str]] = {
    "embed": (("model.", "embedding."), "vectors"),
    "classify": (("classification.labels",), "scores"),
}
_NEVER = (
    "input.id",
    "sampling.n",
    "embedding.task",
    "embedding.dimensions",
    "classification.task",
    "prompt.text_lists",
)

Changed = Mapping[str, tuple[Any, Any]]


def only_the_input_changed(old: RunRecord, wanted: RunRecord) -> bool:
    """Whether the jobs are alike but for the rows of the input, and these are not."""
    changed = differences(old.identity, wanted.identity)
    return not _settings(changed) and any(key not in HARMLESS for key in changed)


def settings_changed(old: RunRecord, wanted: RunRecord) -> bool:
    """Whether the job has settings that the results were not made with."""
    return bool(_settings(differences(old.identity, wanted.identity)))


def check_settings(run: RunDir, old: RunRecord, wanted: RunRecord, *, full_refresh: bool) -> None:
    """Raise ResumeError, with the difference, for a changed setting that the old results were not made with."""
    changed = _settings(differences(old.identity, wanted.identity))
    if not changed:
        return
    lines = [f"{run.root}: the results there were made with other settings:", *difference_lines(changed)]
    never = any(key in _NEVER or key.startswith("output.") for key in changed)
    if full_refresh and not never:
        return
    if never or (run.parts() and _columns_differ(old, wanted)):
        lines.append("Old and new rows cannot stand side by side: --fresh moves the old results aside and starts over.")
    else:
        lines.append("--full-refresh runs every row with these and replaces the results row by row;")
        lines.append("--fresh moves the old results aside and starts over.")
    raise ResumeError("\n".join(lines))


def _columns_differ(old: RunRecord, wanted: RunRecord) -> bool:
    """Whether the jobs add other columns to the input's, as with log-probabilities: a refresh does not help then."""
    there, declared = (
        {field.name: field for field in result_fields(JobSpec.model_validate(one.job))} for one in (old, wanted)
    )
    return there.keys() != declared.keys() or not all(_fits(declared[name], there[name]) for name in there)


def check_rows_that_stay(run: RunDir, old: RunRecord, wanted: RunRecord, changes: Changes) -> None:
    """Raise ResumeError where vectors of another model, or scores of other labels, would stay: of rows that do not run
    tonight."""
    keys, what = _APART.get(wanted.task, ((), ""))
    changed = _settings(differences(old.identity, wanted.identity))
    apart = {key: values for key, values in changed.items() if key.startswith(keys)}
    staying = changes.vanished + changes.beyond_limit - len(changes.dropped)
    if not apart or not staying:
        return
    unread = "run.limit leaves unread" if changes.beyond_limit else "the input has no more"
    fix = "Run them all, without run.limit" if changes.beyond_limit else "--set run.on_vanished=drop drops them"
    lines = [f"{run.root}: {staying:,} results are of rows that {unread}; their {what} cannot stand beside others:"]
    lines += [*difference_lines(apart), f"{fix}; --fresh moves the old results aside and starts over."]
    raise ResumeError("\n".join(lines))


def _settings(changed: Changed) -> dict[str, tuple[Any, Any]]:
    known = (*_TODAY, *HARMLESS)
    return {key: values for key, values in changed.items() if key not in known and not key.startswith(_ADAPTERS_TODAY)}


def check_columns_fit(parts: Mapping[int, Path], declared: pa.Schema, carried: Collection[str]) -> None:
    """Raise ResumeError when results in `declared` columns cannot stand beside those that are there. The `carried` ones
    are the input's."""
    if not parts:
        return
    path = parts[min(parts)]
    there = read_part_schema(path)
    lost = [name for name in there.names if name not in declared.names]
    fresh = [name for name in declared.names if name not in there.names]
    other = [
        name for name in there.names if name in declared.names and not _fits(declared.field(name), there.field(name))
    ]
    if not (lost or fresh or other):
        return
    lines = [f"{path.parent}: the columns are not those of the results there:"]
    lines += [f"  {name}: {there.field(name).type} -> none" for name in lost]
    lines += [f"  {name}: none -> {declared.field(name).type}" for name in fresh]
    lines += [f"  {name}: {there.field(name).type} -> {declared.field(name).type}" for name in other]
    is_own = not lost and not {*fresh, *other} & {*carried}
    fix = "Name the columns to pass through in input.columns, cast them in input.sql, or start over with --fresh."
    lines.append(
        "--fresh moves the old results aside and starts over; another output.path keeps both." if is_own else fix
    )
    raise ResumeError("\n".join(lines))


def _fits(new: pa.Field, old: pa.Field) -> bool:
    """Whether values of the new type go into a column of the old one, but for single ones (`fitting`)."""
    new, old = (field.with_type(_of_any_length(field.type)) for field in (new, old))
    if new.type == old.type:
        return True
    if all(pa.types.is_timestamp(field.type) and field.type.tz for field in (new, old)):
        new = new.with_type(pa.timestamp(new.type.unit, old.type.tz))  # the same instants, shown otherwise
    try:
        united = pa.unify_schemas([pa.schema([old]), pa.schema([new])], promote_options="permissive")
    except (pa.ArrowTypeError, pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return False
    is_wider = bool(united.field(0).type == old.type)
    return is_wider and can_cast(new.type, old.type) and not rounds(new.type, old.type)


def _of_any_length(kind: pa.DataType) -> pa.DataType:
    """The type without what only says how long its values are together: large texts and lists are texts and lists."""
    short = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}
    return with_leaves(kind, lambda leaf: short.get(leaf, leaf), large_lists=False)
