"""The tools in the body of an OpenAI chat, and whether they have to be called. Knows no other parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bulkrun.job.jobfile.tools import AUTO, NO_OFFER, NONE, Offer, check_choice, check_tools, offered
from bulkrun.job.prompts.body_keys import BadBody


def offer_of(body: Mapping[str, Any], *, has_calls: bool) -> Offer:
    """What a body offers; `has_calls`: the job has a column for calls. Raises BadBody."""
    choice = body.get("tool_choice", AUTO)
    try:
        check_choice(choice)
    except ValueError as problem:
        raise BadBody(f"body.tool_choice: {problem}") from None
    try:
        tools = check_tools(body.get("tools", []))
    except ValueError as problem:
        raise BadBody(f"body.tools: {problem}") from None
    if tools and choice != NONE and not has_calls:
        raise BadBody(
            "body.tools: given, but the job has no column for calls; set sampling.tool_calls: {} in the job file"
        )
    try:
        return offered(tools, choice) if tools or choice != NONE else NO_OFFER
    except ValueError as problem:
        raise BadBody(f"body.tool_choice: {problem}") from None
