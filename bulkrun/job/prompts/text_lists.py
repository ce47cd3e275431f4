"""`prompt.text_lists`: the texts of a row that may have several, from a column or from the input of an OpenAI line.

Knows no tokens and no bodies.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from bulkrun.data.types.json_types import NOT_UNICODE, is_unicode, list_in
from bulkrun.job.jobfile.prompt import PromptSpec
from bulkrun.job.prompts.conversations import Ask, RowToAsk, column_maker, shown
from bulkrun.request import RowError


def list_maker(spec: PromptSpec, columns: Sequence[str]) -> tuple[RowToAsk, list[str]]:
    """The function from a row to its texts, and the column that it reads. Raises JobFileError where it is not there."""
    assert spec.column is not None, "a prompt section without a mapping is resolved from the columns first"
    return column_maker("prompt.column", spec.column, columns, _in_column)


def _in_column(place: str, given: Any) -> Ask | RowError:
    """What a cell asks, whose list may be JSON in a column of text."""
    listed = list_in(given) if isinstance(given, str) else None
    if listed is None:
        return asked_texts(place, given)
    asked = asked_texts(place, listed)
    if isinstance(asked, Ask):
        return asked
    fix = f"if this very text is meant, put it in a list: {shown(json.dumps([given]))}"
    return asked._replace(message=f"{asked.message}; {fix}")


def asked_texts(place: str, given: Any) -> Ask | RowError:
    """What a value asks: a text, or a list of them. An error names the place and the text."""
    texts = given if isinstance(given, list) else [given]
    if not texts:
        return RowError("empty_prompt", f"{place}: [] holds no text")
    for index, text in enumerate(texts):
        where = place if given is text else f"{place}, text {index}"
        if not isinstance(text, str):
            return RowError("bad_input", f"{where}: {shown(text)} is not text")
        if not text.strip():
            return RowError("empty_prompt", f"{where}: the text is empty")
        if not is_unicode(text):
            return RowError("bad_input", f"{where}: it holds {NOT_UNICODE}")
    return Ask([], raw=True, texts=tuple(texts))
