"""`chat_template_kwargs`: values that a chat template reads beside the messages, as `enable_thinking: false`.

Name and meaning are vLLM's. They come from a job file, the body of a batch line or a call from Python, and are checked
here for all three. Knows names and JSON values; knows no template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bulkrun.errors import shortened

_RESERVED = {
    "messages": "they are the prompt itself",
    "tools": "set prompt.tools (in a batch line tools, in Python chat(tools=...))",
    "add_generation_prompt": "a job's prompts ask for an answer (a batch line has the key itself, and so has chat())",
    "continue_final_message": "set prompt.continue_final_message (in a batch line the key itself, as in chat())",
    "chat_template": "set prompt.chat_template",
    "tokenize": "text and token ids are made as the engine needs them",
}


def check_template_kwargs(values: Any) -> None:
    """Raise ValueError, naming the key, for what no chat template can be given: a reserved name, no JSON value."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{shortened(repr(values))} is not a mapping of names to values")
    for name, value in values.items():
        if name in _RESERVED:
            raise ValueError(f"{name} cannot be set: {_RESERVED[name]}; leave it out")
        if not isinstance(name, str) or not is_json(value):
            raise ValueError(f"{shortened(repr(name))}: {shortened(repr(value))} is not a JSON value under a name")


def is_json(value: Any) -> bool:
    """Whether the value comes back from JSON as it was: the run's record and every worker read it from there."""
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError, RecursionError):
        return False
