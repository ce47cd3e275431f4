"""`prompt.text_pair`: the second text of a row, for models that compare two. Knows no tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bulkrun.data.types.json_types import NOT_UNICODE, is_unicode
from bulkrun.job.prompts.conversations import refuse_single_braces
from bulkrun.job.prompts.templates import RowTemplate
from bulkrun.request import RowError

_KEY = "prompt.text_pair"


class SecondText:
    """The job's template of second texts; `reads` are the columns that it needs.

    Raises JobFileError for a template that does not parse and for a column that is not there, or is in single braces
    alone: a fixed text may be meant (the hypothesis of an NLI model), such a one is not.
    """

    def __init__(self, source: str, columns: Sequence[str]) -> None:
        self._template = RowTemplate(_KEY, source, columns)
        self.reads = self._template.reads
        refuse_single_braces(_KEY, source, columns, self.reads)

    def render(self, row: Mapping[str, Any]) -> str | RowError:
        """The second text of one row (column -> Python value), or why there is none."""
        text = self._template.render(row)
        if isinstance(text, RowError):
            return text
        if not text.strip():
            return RowError("empty_prompt", f"{_KEY}: the second text is empty")
        if not is_unicode(text):
            return RowError("bad_input", f"{_KEY}: it holds {NOT_UNICODE}")
        return text
