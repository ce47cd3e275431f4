"""The one text that a plain line is about: a completion's `prompt`, what an embedding is made of (`input`).

A prompt may also be the token ids of one.
"""

from __future__ import annotations

from typing import Any

from bulkrun.job.prompts.body_keys import BadBody
from bulkrun.job.prompts.conversations import shown

_A_LINE_EACH = "write a line for each"


def one_list_of_ids(key: str, value: Any) -> list[int] | None:
    """The token ids, given alone or as a list of one; None where there are none. Raises BadBody for several lists."""
    listed = value if isinstance(value, list) else []
    are_nested = bool(listed) and all(isinstance(each, list) for each in listed)
    lists = listed if are_nested else [listed]
    ids = [token for each in lists for token in each]
    if not ids or not all(type(token) is int for token in ids):
        return None
    if len(lists) > 1:
        raise BadBody(f"body.{key}: {len(lists)} {key}s in one line; {_A_LINE_EACH}")
    return ids


def one_text(key: str, value: Any, for_several: str = _A_LINE_EACH) -> str:
    """The text, given alone or as a list of one. Raises BadBody for several (`for_several` says what to do) and
    for anything else."""
    text = value[0] if isinstance(value, list) and len(value) == 1 else value
    if isinstance(text, str):
        return text
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        raise BadBody(f"body.{key}: {len(value)} {key}s in one line; {for_several}")
    raise BadBody(f"body.{key}: {shown(value)} is not text")
