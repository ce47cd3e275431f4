"""Prompts that come as token ids, from a column (`prompt.token_ids`) or a line. Knows no tokenizer and no model.

An id that the model does not have is for the engine to refuse, which knows how many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bulkrun.job.jobfile.prompt import PromptSpec
from bulkrun.job.prompts.conversations import Ask, RowToAsk, column_maker, shown
from bulkrun.job.prompts.overrides import token_ids_in
from bulkrun.request import RowError

_MOST = 2**31 - 1  # a plan holds them as int32


def token_maker(spec: PromptSpec, columns: Sequence[str]) -> tuple[RowToAsk, list[str]]:
    """The function from a row to its token ids, and the column that it reads. Raises JobFileError where it is not
    there."""
    assert spec.token_ids is not None, "others have another maker"
    return column_maker("prompt.token_ids", spec.token_ids, columns, ask_of_ids)


def ask_of_ids(place: str, given: Any) -> Ask | RowError:
    """What a list asks, which may be JSON in a column of text; `place` names it."""
    try:
        token_ids = token_ids_in(given)
    except ValueError:
        return RowError("bad_input", f"{place}: {shown(given)} is not a list of token ids, as [5, 17]")
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) <= _MOST):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id <= _MOST)
        return RowError("bad_input", f"{place}: {wrong} is no token id")
    return Ask([], raw=True, token_ids=token_ids)
