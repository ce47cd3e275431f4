"""The tools that a job offers to its rows: those of the job file, or those that stand in a column.

Knows how a list of tools comes; knows no template and no calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bulkrun.data.inputs.python_rows import without_nulls
from bulkrun.errors import JobFileError
from bulkrun.job.jobfile.prompt import PromptSpec
from bulkrun.job.jobfile.tools import Offer, check_tools, offered
from bulkrun.job.prompts.conversations import Ask, RowToAsk, shown
from bulkrun.job.prompts.templates import unknown_column
from bulkrun.request import RowError

_RowToOffer = Callable[[Mapping[str, Any]], Offer]


def with_tools(
    made: tuple[RowToAsk, list[str]], spec: PromptSpec, columns: Sequence[str], *, needs_texts: bool = False
) -> tuple[RowToAsk, list[str]]:
    """What asks (with the columns that it reads), with the job's tools beside what it asks.

    `needs_texts`: with the parameters that are texts (`ToolCallsSpec.needs_texts`).
    Raises JobFileError for a column that is not there, and for a tool that has to be called and is not there.
    """
    if spec.tools is None:
        return made
    ask, reads = made
    offer = _of_column(spec, columns, needs_texts) if isinstance(spec.tools, str) else _of_job(spec, needs_texts)

    def ask_with_tools(row: Mapping[str, Any]) -> Ask | RowError:
        asked = ask(row)
        if isinstance(asked, RowError):
            return asked
        try:
            given = offer(row)
        except ValueError as problem:
            return RowError("bad_input", f"column {spec.tools!r}: {problem}")
        return asked._replace(sampling=given.sampling, template_kwargs=given.template_kwargs)

    return ask_with_tools, [*reads, spec.tools] if isinstance(spec.tools, str) else reads


def _of_job(spec: PromptSpec, needs_texts: bool) -> _RowToOffer:
    assert isinstance(spec.tools, list), "else a column has them"
    try:
        offer = offered(spec.tools, spec.tool_choice)
    except ValueError as problem:
        raise JobFileError([f"prompt.tool_choice: {problem}"]) from None
    given = offer.with_texts() if needs_texts else offer
    return lambda _row: given


def _of_column(spec: PromptSpec, columns: Sequence[str], needs_texts: bool) -> _RowToOffer:
    name = str(spec.tools)
    if name not in columns:
        raise JobFileError([f"prompt.tools: {unknown_column(name, columns)}"])

    def offer(row: Mapping[str, Any]) -> Offer:
        given = offered(check_tools(_listed(row[name])), spec.tool_choice)
        return given.with_texts() if needs_texts else given

    return offer


def _listed(value: Any) -> Any:
    """The list in a column, which may be JSON text. A null or an empty text is no tools."""
    try:
        listed = json.loads(value or "[]") if isinstance(value, str) else without_nulls(value)
    except (ValueError, RecursionError):
        raise ValueError(f"{shown(value)} is not a JSON list of tools") from None
    return [] if listed is None else listed
