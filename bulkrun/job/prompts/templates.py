"""The job's prompt templates: Jinja over the columns of one row, checked before the run.

A template that does not parse, or that names a column the input does not have, stops the job before any work; what
goes wrong for one row's values is that row's error. A row's values are data: `{{ }}` in them is never rendered.
Knows no messages, models or tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.compiler import find_undeclared

from bulkrun.errors import JobFileError, did_you_mean
from bulkrun.job.prompts.row_sandbox import NullPrinted, RowSandbox
from bulkrun.request import RowError
from bulkrun.sandbox import TemplateFailed

ROW_VARIABLE = "row"  # the whole row, for columns whose names are not identifiers: {{ row["my column"] }}
_OWN_NAME = "self"  # the template itself, in each: no value can take this name's place


class RowTemplate:
    """One template of the job file, compiled.

    `key` is where it stands in the job file (`prompt.template`), for messages. `columns` is what the input has;
    the ones that the template reads are `reads`. Raises JobFileError for a syntax error or an unknown column.
    """

    def __init__(self, key: str, source: str, columns: Sequence[str]) -> None:
        self._key = key
        self._sandbox = RowSandbox()
        try:
            names = _names_in(source)
            self._template = self._sandbox.compile_template(source)
        except jinja2.TemplateSyntaxError as problem:
            hint = _hint_of_names(source, columns)
            raise JobFileError([f"{key}: template line {problem.lineno}: {problem.message}{hint}"]) from None
        except (TemplateFailed, RecursionError) as problem:
            raise JobFileError([f"{key}: {problem}"]) from None
        self._whole_row = ROW_VARIABLE in names and ROW_VARIABLE not in columns
        self._named = [name for name in columns if name in names]
        taken, self._takes_more = _taken_from_row(source, columns) if self._whole_row else (set(), False)
        self._printable = [name for name in columns if name in taken or name in self._named]
        self.reads = list(columns) if self._takes_more else self._printable
        if problems := _problems_of_names(names, source, columns):
            raise JobFileError([f"{key}: {problem}" for problem in problems])

    def render(self, row: Mapping[str, Any]) -> str | RowError:
        """The text for one row (column -> Python value), or why there is none."""
        values = {name: row[name] for name in self._named}  # no others: they would hide functions of their names
        if self._whole_row:
            values[ROW_VARIABLE] = row
        try:
            return self._sandbox.render_capped(self._template, values)
        except TemplateFailed as problem:
            if isinstance(problem.__cause__, NullPrinted):
                return RowError("bad_input", f"{self._key}: {self._nulls(row)}")
            return RowError("bad_template", f"{self._key}: {problem}")

    def _nulls(self, row: Mapping[str, Any]) -> str:
        nulls = [name for name in self._printable if row.get(name) is None]
        more = f" or a column taken from {ROW_VARIABLE}" if nulls and self._takes_more else ""
        if not nulls and self._takes_more:
            nulls = [name for name in self.reads if row.get(name) is None]
        what = (", ".join(map(repr, nulls)) or "a value inside a column") + more
        first = nulls[0] if nulls else "..."
        printed = first if first in self._named or not nulls else f"{ROW_VARIABLE}[{first!r}]"
        return f"prints {what}, which is null in this row; write {{{{ {printed} or '' }}}} where null is fine"


def _names_in(source: str) -> set[str]:
    """The names that a template looks up. Jinja's functions (`range`) count as its own only where they are called:
    columns have such names too, and nobody calls a column. Raises what parsing raises."""
    sandbox = RowSandbox()
    functions = set(sandbox.globals)
    sandbox.globals.clear()  # Jinja leaves their names out
    parsed = sandbox.parse(source)
    called = {call.node.name for call in parsed.find_all(nodes.Call) if isinstance(call.node, nodes.Name)}
    names = meta.find_undeclared_variables(parsed) | find_undeclared(parsed.body, (_OWN_NAME,))
    return names - (functions & called)


def _taken_from_row(source: str, columns: Sequence[str]) -> tuple[set[str], bool]:
    """The columns that a template takes from `row` by name, and whether it does anything else with `row`."""
    parsed = RowSandbox().parse(source)
    fields = [node.attr for node in parsed.find_all(nodes.Getattr) if _is_row(node.node)]
    items = [node.arg for node in parsed.find_all(nodes.Getitem) if _is_row(node.node)]
    fields += [item.value for item in items if isinstance(item, nodes.Const)]
    named = [field for field in fields if field in columns]  # others may be methods: row.items()
    return set(named), sum(map(_is_row, parsed.find_all(nodes.Name))) > len(named)


def _is_row(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) and node.name == ROW_VARIABLE


def _problems_of_names(names: Set[str], source: str, columns: Sequence[str]) -> list[str]:
    """What is wrong with the names that a template looks up."""
    if _OWN_NAME in names and _OWN_NAME in columns:
        return [f"{_OWN_NAME!r} is Jinja's own word; {_as_written(_OWN_NAME)}"]
    unknown = sorted(names - set(columns) - {ROW_VARIABLE, _OWN_NAME})
    return [unknown_column(name, columns) + _hint_of_names(source, columns) for name in unknown]


def _as_written(column: str) -> str:
    return f"the column {column!r} is written {{{{ {ROW_VARIABLE}[{json.dumps(column, ensure_ascii=False)}] }}}}"


def _hint_of_names(source: str, columns: Sequence[str]) -> str:
    """How to write a column that the template seems to name, and that Jinja reads as something else."""
    for name in columns:
        bare = rf"\{{[{{%][^}}]*(?<![\w\"']){re.escape(name)}(?![\w\"'])"
        if name and not name.isidentifier() and re.search(bare, source):
            return f"; {_as_written(name)}"
    return ""


def columns_of(source: str) -> list[str]:
    """The names that a template reads, sorted; none where it does not parse (`RowTemplate` tells why)."""
    try:
        names = _names_in(source)
    except (jinja2.TemplateSyntaxError, TemplateFailed, RecursionError):
        return []
    return sorted(names - {ROW_VARIABLE, _OWN_NAME})


def unknown_column(name: str, columns: Sequence[str]) -> str:
    """The message for a column that the input does not have: with the nearest name, or all of them."""
    if near := did_you_mean(name, columns):
        return f"the input has no column {name!r}; {near}"
    return f"no column {name!r}; the input has: {', '.join(columns) or 'no columns'}"
