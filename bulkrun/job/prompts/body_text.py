"""The one text that a plain line is about: a completion's `prompt`, what an embedding is made of (`input`)."""

from __future__ import annotations

from typing import Any

from bulkrun.job.prompts.body_keys import BadBody
from bulkrun.job.prompts.conversations import shown


def one_text(key: str, value: Any, for_several: str = "write a line for each") -> str:
    """The text, given alone or as a list of one. Raises BadBody for several (`for_several` says what to do), for token
    ids and for anything else."""
    text = value[0] if isinstance(value, list) and len(value) == 1 else value
    if isinstance(text, str):
        return text
    refuse_token_ids(key, value)
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        raise BadBody(f"body.{key}: {len(value)} {key}s in one line; {for_several}")
    raise BadBody(f"body.{key}: {shown(value)} is not text")


def refuse_token_ids(key: str, value: Any) -> None:
    """Raise BadBody for a list of them, or of lists of them."""
    listed = value if isinstance(value, list) else []
    ids = [token for each in listed for token in (each if isinstance(each, list) else [each])]
    if ids and all(isinstance(token, int) for token in ids):
        what = "token ids are not supported, as they belong to another model's tokenizer; send text"
        raise BadBody(f"body.{key}: {what}")
