"""The tools in the body of an OpenAI chat, and whether they have to be called. Knows no other parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from bulkrun.job.jobfile.tool_calls import ToolCallsSpec
from bulkrun.job.jobfile.tools import AUTO, NO_OFFER, NONE, Offer, check_choice, check_tools, offered
from bulkrun.job.prompts.body_keys import BadBody, flag_of
from bulkrun.job.prompts.conversations import shown

_Checked = TypeVar("_Checked")


def offer_of(body: Mapping[str, Any], calls: ToolCallsSpec | None) -> Offer:
    """What a body offers; `calls`: what becomes of calls, where the job says so. Raises BadBody."""
    choice = body.get("tool_choice", AUTO)
    _checked("tool_choice", check_choice, choice)
    tools = _checked("tools", check_tools, body.get("tools", []))
    parallel = flag_of(body, "parallel_tool_calls")
    if not tools and choice in (AUTO, NONE):
        return NO_OFFER
    if tools and choice != NONE and calls is None:
        raise BadBody(
            "body.tools: given, but the job has no column for calls; set sampling.tool_calls: {} in the job file"
        )
    if choice not in (AUTO, NONE) and calls is not None and not calls.are_read:
        raise BadBody(
            f"body.tool_choice: {shown(choice)}: what has to be called has a form: sampling.tool_calls.format"
        )
    offer = _checked("tool_choice", partial(offered, tools, parallel=parallel), choice)
    return offer.with_texts() if calls is not None and calls.needs_texts else offer


def _checked(key: str, check: Callable[[Any], _Checked], value: Any) -> _Checked:
    try:
        return check(value)
    except ValueError as problem:
        raise BadBody(f"body.{key}: {problem}") from None
