"""Which of the job's adapters a row runs with: `input.adapter`, or the `model` of an OpenAI line. Knows names alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bulkrun.errors import JobFileError, did_you_mean, shortened
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.prompts.conversations import Ask, RowToAsk, shown
from bulkrun.job.prompts.detect import is_openai_batch
from bulkrun.job.prompts.own_values import ADAPTER
from bulkrun.job.prompts.templates import unknown_column
from bulkrun.request import RowError

_SHOWN_CHARS = 200  # of all names


def with_adapters(
    made: tuple[RowToAsk, list[str]], spec: JobSpec, columns: Sequence[str]
) -> tuple[RowToAsk, list[str]]:
    """What asks (with the columns that it reads), with each row's adapter among its own values.

    A row that names none, or the job's model, runs without one. Raises JobFileError for a column that is not there, and
    where no row could name an adapter.
    """
    if not spec.engine.adapters:
        return made
    (ask, reads), column = made, spec.input.adapter
    where, given = _of_column(column, columns) if column is not None else _of_line(spec, columns)

    def ask_with_adapter(row: Mapping[str, Any]) -> Ask | RowError:
        asked = ask(row)
        if isinstance(asked, RowError):
            return asked
        try:
            name = _named(given(row, asked), spec)
        except ValueError as problem:
            return RowError("bad_input", f"{where}: {problem}")
        return asked._replace(sampling={**asked.sampling, ADAPTER: name}) if name else asked

    return ask_with_adapter, reads if column is None else [*reads, column]


_Given = Callable[[Mapping[str, Any], Ask], Any]


def _of_column(name: str, columns: Sequence[str]) -> tuple[str, _Given]:
    if name not in columns:
        raise JobFileError([f"input.adapter: {unknown_column(name, columns)}"])
    return f"column {name!r} (input.adapter)", lambda row, _asked: row[name]


def _of_line(spec: JobSpec, columns: Sequence[str]) -> tuple[str, _Given]:
    if not is_openai_batch(spec.prompt, columns):
        raise JobFileError(["engine.adapters: no row names one; say which column does, in input.adapter"])
    return "body.model", lambda _row, asked: asked.model


def _named(value: Any, spec: JobSpec) -> str | None:
    """The adapter that a value names, None for none. Raises ValueError for what is none.

    An integer is a name, too, also as the double that one null makes of it (in pandas, or in JSON), and as that one's
    text (in the CSV that pandas writes).
    """
    is_whole = type(value) is int or (isinstance(value, float) and value.is_integer())
    name = str(int(value)) if is_whole else value
    if name is None or name in ("", spec.model):
        return None
    if isinstance(name, str) and name in spec.engine.adapters:
        return name
    if isinstance(name, str) and (whole := name.removesuffix(".0")).isdecimal() and whole in spec.engine.adapters:
        return whole
    near = did_you_mean(name, spec.engine.adapters) if isinstance(name, str) else ""
    known = shortened(", ".join(spec.engine.adapters), _SHOWN_CHARS)
    raise ValueError(f"{shown(value)} is none of engine.adapters; {near or f'there are: {known}'}")
