"""The tools of a /v1/responses body in the form of a chat's, which templates and grammars read.

Functions stand flat there, beside the tools that OpenAI runs itself, which are refused by name. Knows their form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bulkrun.job.jobfile.tools import AUTO, REQUIRED
from bulkrun.job.prompts.body_keys import BadBody
from bulkrun.job.prompts.conversations import shown

_FORM = "{type: function, name: text, description: text, parameters: JSON schema}"
_KEYS = ("name", "description", "parameters", "strict")  # of a function
# What says nothing to a model that sees every tool and is called directly.
_NEUTRAL: Mapping[str, Any] = {"defer_loading": False, "async": False, "allowed_callers": ["direct"]}
_ALLOWED = "allowed_tools"
_Tool = dict[str, Any]


def as_chat_tools(body: Mapping[str, Any]) -> dict[str, Any]:
    """`tools`, `tool_choice` and `parallel_tool_calls` as a chat with the same tools has them. Raises BadBody.

    Of `allowed_tools` the other tools count as if they were not there.
    """
    tools, choice = _tools(body.get("tools", [])), body.get("tool_choice", AUTO)
    if isinstance(choice, dict):
        tools, choice = _allowed(tools, choice) if choice.get("type") == _ALLOWED else (tools, _one(choice))
    same = {key: body[key] for key in ("parallel_tool_calls",) if key in body}
    return {"tools": tools, "tool_choice": choice, **same}


def _tools(given: Any) -> list[_Tool]:
    if not isinstance(given, list):
        raise BadBody(f"body.tools: {shown(given)} is not a list of tools: {_FORM}")
    return [_tool(f"body.tools: item {index}", tool) for index, tool in enumerate(given)]


def _tool(place: str, given: Any) -> _Tool:
    """A function; nulls in it count as absent, and the keys stay in their order, in which templates print them."""
    kind = given.get("type") if isinstance(given, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise BadBody(f"{place}: a tool of type {shown(kind)} is not supported; only function is")
    if not isinstance(kind, str) or not isinstance(given.get("name"), str):
        raise BadBody(f"{place}: {shown(given)} is not {_FORM}")
    function = {key: value for key, value in given.items() if key != "type" and value is not None}
    for key in [key for key in function if key not in _KEYS]:
        if function[key] != _NEUTRAL.get(key):
            raise BadBody(f"{place}: {shown(key)[1:-1]}: {shown(function[key])} is not supported; leave it out")
        del function[key]
    return {"type": "function", "function": function}


def _one(choice: Mapping[str, Any]) -> _Tool:
    """A choice of one function, where it is one."""
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise BadBody(
            f"body.tool_choice: {shown(choice)} is not auto, none, required, {{type: function, name: text}} or "
            "{type: allowed_tools, mode: auto, tools: [{type: function, name: text}]}"
        )
    return {"type": "function", "function": {"name": choice["name"]}}


def _allowed(tools: Sequence[_Tool], choice: Mapping[str, Any]) -> tuple[list[_Tool], Any]:
    mode, listed = choice.get("mode"), choice.get("tools")
    if mode not in (AUTO, REQUIRED):
        raise BadBody(f"body.tool_choice.mode: {shown(mode)} is not auto or required")
    if not isinstance(listed, list) or not listed:
        raise BadBody(f"body.tool_choice.tools: {shown(listed)} is not a list of {{type: function, name: text}}")
    known = {tool["function"]["name"]: tool for tool in tools}
    names = [_one(tool)["function"]["name"] if isinstance(tool, dict) else None for tool in listed]
    for name, tool in zip(names, listed, strict=True):
        if name not in known:
            raise BadBody(f"body.tool_choice.tools: {shown(tool)}; the tools are: {', '.join(known) or 'none'}")
    return [tool for name, tool in known.items() if name in names], mode
