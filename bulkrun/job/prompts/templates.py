"""The job's prompt templates: Jinja over the columns of one row, checked before the run.

A template that does not parse, or that names a column the input does not have, stops the job before any work; what
goes wrong for one row's values is that row's error. A row's values are data: `{{ }}` in them is never rendered.
Knows no messages, models or tokens.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import meta

from bulkrun.errors import JobFileError
from bulkrun.request import RowError
from bulkrun.sandbox import Sandbox, TemplateFailed

ROW_VARIABLE = "row"  # the whole row, for columns whose names are no identifiers: {{ row["my column"] }}


class _NullPrinted(Exception):
    """A template put out a null, which would read "None" in the prompt."""


class RowTemplate:
    """One template of the job file, compiled.

    `key` is where it stands in the job file (`prompt.template`), for messages. `columns` is what the input has;
    the ones that the template reads are `reads`. Raises JobFileError for a syntax error or an unknown column.
    """

    def __init__(self, key: str, source: str, columns: Sequence[str]) -> None:
        self._key = key
        self._sandbox = Sandbox(strict=True, finalize=_refuse_null)
        try:
            names = meta.find_undeclared_variables(self._sandbox.parse(source))
            self._template = self._sandbox.compile_template(source)
        except jinja2.TemplateSyntaxError as problem:
            raise JobFileError([f"{key}: template line {problem.lineno}: {problem.message}"]) from None
        except (TemplateFailed, RecursionError) as problem:
            raise JobFileError([f"{key}: {problem}"]) from None
        names -= set(self._sandbox.globals)
        whole_row = ROW_VARIABLE in names and ROW_VARIABLE not in columns
        unknown = sorted(names - set(columns) - {ROW_VARIABLE})
        if unknown:
            raise JobFileError([f"{key}: {unknown_column(name, columns)}" for name in unknown])
        self._whole_row = whole_row
        self.reads = list(columns) if whole_row else [name for name in columns if name in names]

    def render(self, row: Mapping[str, Any]) -> str | RowError:
        """The text for one row (column -> Python value), or why there is none."""
        values = {ROW_VARIABLE: row, **row} if self._whole_row else row
        try:
            return self._sandbox.render_capped(self._template, values)
        except TemplateFailed as problem:
            if isinstance(problem.__cause__, _NullPrinted):
                return RowError("bad_input", f"{self._key}: {self._nulls(row)}")
            return RowError("bad_template", f"{self._key}: {problem}")

    def _nulls(self, row: Mapping[str, Any]) -> str:
        nulls = [repr(name) for name in self.reads if row.get(name) is None]
        column = ", ".join(nulls) or "a value inside a column"
        return f"prints {column}, which is null in this row; write {{{{ x or '' }}}} where null is fine"


def columns_of(source: str) -> list[str]:
    """The names that a template reads, sorted; none where it does not parse (`RowTemplate` tells why)."""
    sandbox = Sandbox(strict=True)
    try:
        names = meta.find_undeclared_variables(sandbox.parse(source))
    except (jinja2.TemplateSyntaxError, TemplateFailed, RecursionError):
        return []
    return sorted(names - set(sandbox.globals) - {ROW_VARIABLE})


def unknown_column(name: str, columns: Sequence[str]) -> str:
    """The message for a column that the input does not have: with the nearest name, or all of them."""
    near = difflib.get_close_matches(name, columns, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"the input has: {', '.join(columns) or 'no columns'}"
    return f"the input has no column {name!r}; {hint}" if near else f"no column {name!r}; {hint}"


def _refuse_null(value: Any) -> Any:
    if value is None:
        raise _NullPrinted
    return value
