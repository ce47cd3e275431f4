"""The one text that a plain line is about: a completion's `prompt`, what an embedding is made of (`input`)."""

from __future__ import annotations

from typing import Any

from bulkrun.job.prompts.body_keys import BadBody
from bulkrun.job.prompts.conversations import shown


def one_text(key: str, value: Any) -> str:
    """The text, given alone or as a list of one. Raises BadBody for several, for token ids and for anything else."""
    text = value[0] if isinstance(value, list) and len(value) == 1 else value
    if not isinstance(text, str):
        raise BadBody(f"body.{key}: {_what_else(key, value)}")
    return text


def _what_else(key: str, value: Any) -> str:
    listed = value if isinstance(value, list) else []
    if listed and all(isinstance(each, str) for each in listed):
        return f"{len(listed)} {key}s in one line; write a line for each"
    ids = [token for each in listed for token in (each if isinstance(each, list) else [each])]
    if ids and all(isinstance(token, int) for token in ids):
        return "token ids are not supported, as they belong to another model's tokenizer; send text"
    return f"{shown(value)} is not text"
