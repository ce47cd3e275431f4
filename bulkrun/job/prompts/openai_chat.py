"""OpenAI's /v1/chat/completions as lines of a batch, and what every conversation in a batch asks.

Names are OpenAI's and, for what OpenAI has not, vLLM's. Knows bodies; knows no lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bulkrun.job.jobfile.tool_calls import ToolCallsSpec
from bulkrun.job.jobfile.tools import Offer
from bulkrun.job.prompts.body_keys import CHAT_URL, BadBody
from bulkrun.job.prompts.body_params import BodyParams, continues, template_kwargs
from bulkrun.job.prompts.body_tools import offer_of
from bulkrun.job.prompts.conversations import Ask, BadMessages, Conversation, read_messages


def read_chat(body: dict[str, Any], params: BodyParams, calls: ToolCallsSpec | None) -> Ask:
    """What a body without nulls asks; `calls`: what becomes of calls. Raises BadBody, naming the key."""
    if "messages" not in body:
        raise BadBody(f"body.messages: missing; {CHAT_URL} needs a list of messages")
    try:
        messages = read_messages(body["messages"])
    except BadMessages as problem:
        raise BadBody(f"body.messages{problem}") from None
    sampling, offer = params.of_chat(body), offer_of(body, calls)
    asked = chat_ask(messages, sampling, template_kwargs(body), offer, calls)
    return asked._replace(continues=continues(body))


def chat_ask(
    messages: Conversation,
    sampling: Mapping[str, Any],
    kwargs: Mapping[str, Any],
    offer: Offer,
    calls: ToolCallsSpec | None,
) -> Ask:
    """What a conversation asks, given its values of its own. Raises BadBody for tools beside a form of the answer."""
    if offer.tools and "structured_outputs" in sampling and calls is not None and calls.are_read:
        raise BadBody("body.tools: given together with what says how the answer looks, which has no room for calls")
    own = {**sampling, **offer.sampling}
    return Ask(_with_known_roles(messages), sampling=own, template_kwargs={**kwargs, **offer.template_kwargs})


def _with_known_roles(messages: Conversation) -> Conversation:
    """`developer` is OpenAI's newer word for `system`, which chat templates know."""
    return [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
