"""The bodies of answers to OpenAI's /v1/responses, but for their heads. Knows the format; knows no files.

Whoever reads one looks for the items in `output`; the rest says what the line asked for, as far as the results hold it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from bulkrun.job.prompts.body_keys import RESPONSES_URL, BadBody
from bulkrun.job.prompts.openai_batch import read_body

Row = Mapping[str, Any]
# What the line's body says, else what a line that says nothing asks for.
_ECHOED: Mapping[str, Any] = MappingProxyType(
    {
        "background": False,
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": None,
        "truncation": "disabled",
        "user": None,
    }
)
_HALF_A_CHARACTER = "\ufffd"


def is_response(row: Row) -> bool:
    """Whether the line was one of /v1/responses."""
    url = row.get("url")
    return isinstance(url, str) and url.rstrip("/") == RESPONSES_URL


def response_body(rows: Sequence[Row], digest: str) -> dict[str, Any]:
    """The answer to one line, whose samples (`rows`, none of them failed) come one after another."""
    is_cut = any(_is_cut(row) for row in rows)
    return {
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "output": output_items(rows, digest),
        **_asked(rows[0]),
        "usage": _usage(rows),
    }


def output_items(rows: Sequence[Row], digest: str) -> list[dict[str, Any]]:
    """What was thought, said and called. Ids are made of the line's and the sample's."""
    return [item for row in rows for item in _items(row, f"{digest}_{row['sample']}")]


def _items(row: Row, name: str) -> Iterator[dict[str, Any]]:
    status = "incomplete" if _is_cut(row) else "completed"
    if (reasoning := row.get("reasoning")) is not None:
        content = [{"type": "reasoning_text", "text": reasoning}]
        yield {"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": content, "status": "completed"}
    if row["response"] is not None:
        head = {"id": f"msg_{name}", "type": "message", "role": "assistant", "status": status}
        yield {**head, "content": [_text(row)]}
    for number, call in enumerate(row.get("tool_calls") or ()):
        called = {"call_id": call["id"], "name": call["name"], "arguments": call["arguments"]}
        yield {"id": f"fc_{name}_{number}", "type": "function_call", **called, "status": "completed"}


def _is_cut(row: Row) -> bool:
    return bool(row["finish_reason"] == "length")


def _text(row: Row) -> dict[str, Any]:
    logprobs = [_with_top(entry) for entry in row.get("logprobs") or ()]
    return {"type": "output_text", "text": row["response"], "annotations": [], "logprobs": logprobs}


def _with_top(entry: Row) -> dict[str, Any]:
    return {**_token(entry), "top_logprobs": [_token(other) for other in entry["top"] or ()]}


def _token(entry: Row) -> dict[str, Any]:
    """As of a chat, but that null is not allowed here."""
    token = entry["token"]
    return {"token": token, "logprob": entry["logprob"], "bytes": token_bytes(token) or []}


def token_bytes(token: str) -> list[int] | None:
    """The bytes of a token by its text. None for one that is part of a character: nobody knows them any more."""
    return None if _HALF_A_CHARACTER in token else list(token.encode())


def _usage(rows: Sequence[Row]) -> dict[str, Any]:
    """Results do not say which of the tokens were thoughts, or came from a cache: those counts are 0."""
    read = rows[0]["prompt_tokens"] or 0
    written = sum(row["completion_tokens"] or 0 for row in rows)
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": read + written,
    }


def _asked(row: Row) -> dict[str, Any]:
    try:
        body = read_body(row.get("body"))
    except BadBody:  # the column was left out, or a retry with a prompt of its own answered such a line
        body = {}
    return {key: body.get(key, otherwise) for key, otherwise in _ECHOED.items()}
