"""Tool calls in the messages of a conversation, in the form in which chat templates read them.

OpenAI writes a call's arguments as JSON text, templates go through a mapping: the text is parsed, as vLLM does. Knows
calls; knows no messages around them.
"""

from __future__ import annotations

import json
from typing import Any

from bulkrun.errors import shown_value

_FORM = "{id, type: function, function: {name: text, arguments: JSON text or an object}}"


def read_calls(calls: Any) -> list[dict[str, Any]]:
    """The calls of a message, as they came but for their arguments. Raises ValueError with what is none."""
    if not isinstance(calls, list):
        raise ValueError(f"tool_calls: {shown_value(calls)} is not a list of {_FORM}")
    return [_read_call(call) for call in calls]


def _read_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"tool_calls: {shown_value(call)} is not {_FORM}")
    given = {key: value for key, value in call.items() if value is not None}
    return {**given, "function": {**function, "arguments": _arguments(function)}}


def _arguments(function: dict[str, Any]) -> dict[str, Any]:
    """None at all are no arguments."""
    given = function.get("arguments")
    try:
        arguments = json.loads(given or "{}") if isinstance(given, str) else {} if given is None else given
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError(f"tool_calls: {function['name']}: arguments: {shown_value(given)} is not a JSON object")
    return arguments
