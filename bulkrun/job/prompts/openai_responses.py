"""OpenAI's /v1/responses as lines of a batch: what a body asks is what a chat asks that says the same.

Names are OpenAI's and, for what OpenAI has not, vLLM's. Knows bodies; knows no lines.
"""

from __future__ import annotations

from typing import Any

from bulkrun.job.jobfile.tool_calls import ToolCallsSpec
from bulkrun.job.prompts.body_keys import RESPONSES_URL, BadBody
from bulkrun.job.prompts.body_params import BodyParams, response_template_kwargs
from bulkrun.job.prompts.body_tools import offer_of
from bulkrun.job.prompts.conversations import Ask, Conversation, shown
from bulkrun.job.prompts.openai_chat import chat_ask
from bulkrun.job.prompts.response_items import read_input
from bulkrun.job.prompts.response_tools import as_chat_tools


def read_response(body: dict[str, Any], params: BodyParams, calls: ToolCallsSpec | None) -> Ask:
    """What a body without nulls asks; `calls`: what becomes of calls. Raises BadBody, naming the key."""
    sampling = params.of_response(body)  # first: where there is no input, a chat's messages may be
    if "input" not in body:
        raise BadBody(f"body.input: missing; {RESPONSES_URL} needs a text or a list of items")
    messages = [*_instructions(body), *read_input(body["input"])]
    offer = offer_of(as_chat_tools(body), calls)
    return chat_ask(messages, sampling, response_template_kwargs(body), offer, calls)


def _instructions(body: dict[str, Any]) -> Conversation:
    """The message in front; an empty one says nothing."""
    given = body.get("instructions", "")
    if not isinstance(given, str):
        raise BadBody(f"body.instructions: {shown(given)} is not text")
    return [{"role": "system", "content": given}] if given else []
