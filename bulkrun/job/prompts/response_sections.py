"""The objects and lists of a /v1/responses body that hold parameters: `text`, `reasoning`, `include`.

Knows which keys and words they may have; what a format or an effort asks for is read elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bulkrun.errors import did_you_mean
from bulkrun.job.prompts.body_keys import BadBody
from bulkrun.job.prompts.conversations import shown

# verbosity is a hint to OpenAI's own models.
TEXT_KEYS = ("format", "verbosity")
# Beside effort: what becomes of the thoughts of OpenAI's models. Here they are in the answer as they are.
REASONING_KEYS = ("effort", "summary", "generate_summary", "context", "mode")
OUTPUT_LOGPROBS = "message.output_text.logprobs"
# Of what only OpenAI's tools and files bring, and thoughts for OpenAI's models alone to read: there is nothing of them.
NOTHING_TO_INCLUDE = (
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)


def text_format(body: Mapping[str, Any]) -> Any:
    """What `text` says the answer must look like, not read yet; None for nothing. Raises BadBody."""
    return _section(body, "text", TEXT_KEYS).get("format")


def effort_of(body: Mapping[str, Any]) -> Any:
    """How much to think, as `reasoning` says it; None for nothing. Raises BadBody."""
    return _section(body, "reasoning", REASONING_KEYS).get("effort")


def wants_logprobs(body: Mapping[str, Any]) -> bool:
    """Whether `include` asks for log-probabilities. Raises BadBody for what it cannot hold."""
    wanted = body.get("include", [])
    if not isinstance(wanted, list):
        raise BadBody(f"body.include: {shown(wanted)} is not a list of texts")
    for word in wanted:
        if word not in (OUTPUT_LOGPROBS, *NOTHING_TO_INCLUDE):
            raise BadBody(f"body.include: {shown(word)} is not supported; {OUTPUT_LOGPROBS} is")
    return OUTPUT_LOGPROBS in wanted


def _section(body: Mapping[str, Any], name: str, known: tuple[str, ...]) -> dict[str, Any]:
    """The object under a key, without its nulls."""
    given = body.get(name, {})
    if not isinstance(given, dict):
        raise BadBody(f"body.{name}: {shown(given)} is not an object of {', '.join(known)}")
    values = {key: value for key, value in given.items() if value is not None}
    for key, value in values.items():
        if key not in known:
            hint = did_you_mean(key, known) or "leave it out"
            raise BadBody(f"body.{name}.{shown(key)[1:-1]}: {shown(value)}: this parameter is not supported; {hint}")
    return values
