"""Tools that a model may call, and whether it has to: OpenAI's `tools` and `tool_choice`, wherever they are said.

They come from a job file, a column, the body of a batch line or a call from Python, and are checked here for all four.
Knows their form; knows no template and no grammar.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from bulkrun.data.types.json_types import is_unicode
from bulkrun.errors import shown_value
from bulkrun.job.jobfile.template_kwargs import is_json
from bulkrun.job.jobfile.text_parameters import in_place, text_parameters

Tool = Mapping[str, Any]
AUTO, NONE, REQUIRED = "auto", "none", "required"
_FORM = "{type: function, function: {name: text, description: text, parameters: JSON schema}}"
_NO_PARAMETERS: Mapping[str, Any] = MappingProxyType(
    {"type": "object", "properties": {}, "additionalProperties": False}
)


class Offer(NamedTuple):
    """What a row is offered: tools that its prompt shows, and its own value of `sampling.tool_calls`, where it has one.

    That is "none", or a mapping: what has to be called (functions: [{name, parameters}], one: whether it is exactly one
    call), whether several calls may be made at all (parallel), where the row says so, and which parameters may be texts
    (texts: `text_parameters`), for formats that write texts as they write numbers.
    """

    tools: Sequence[Tool] = ()
    tool_calls: str | dict[str, Any] | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        """The row's own values."""
        return {} if self.tool_calls is None else {"tool_calls": self.tool_calls}

    @property
    def bound(self) -> dict[str, Any]:
        """What has to be called, empty where nothing has."""
        return self.tool_calls if isinstance(self.tool_calls, dict) and "functions" in self.tool_calls else {}

    @property
    def texts(self) -> dict[str, Any]:
        """Which parameters may be texts, empty where nobody asked (`with_texts`)."""
        return self.tool_calls.get("texts", {}) if isinstance(self.tool_calls, dict) else {}

    def with_texts(self) -> Offer:
        """The offer with the parameters that may be texts; of what has to be called, each has its schema in place."""
        if not self.tools:
            return self
        own = dict(self.tool_calls) if isinstance(self.tool_calls, dict) else {}
        if "functions" in own:
            own["functions"] = [{**one, "parameters": in_place(one["parameters"])} for one in own["functions"]]
        return self._replace(tool_calls={**own, "texts": text_parameters(self.tools)})

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """What the chat template is given."""
        return {"tools": list(self.tools)} if self.tools else {}


NO_OFFER = Offer()


def check_tools(tools: Any) -> list[Tool]:
    """The tools, as they came. Raises ValueError, naming the item, for what is no list of OpenAI's function tools."""
    if not isinstance(tools, list):
        raise ValueError(f"{shown_value(tools)} is not a list of tools: {_FORM}")
    names = set[str]()
    for index, tool in enumerate(tools):
        if not _is_tool(tool):
            raise ValueError(f"item {index}: {shown_value(tool)} is not {_FORM}")
        if (name := tool["function"]["name"]) in names:
            raise ValueError(f"item {index}: there is another function {name!r}; give each a name of its own")
        names.add(name)
    return tools


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict) or not is_json(tool):
        return False
    name, description, parameters = (function.get(key) for key in ("name", "description", "parameters"))
    is_named = isinstance(name, str) and bool(name.strip()) and is_unicode(name)
    return is_named and isinstance(description, str | None) and isinstance(parameters, dict | None)


def check_choice(choice: Any) -> str | None:
    """The name of the one function that has to be called, or None for the other words. Raises ValueError."""
    if choice in (AUTO, NONE, REQUIRED):
        return None
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise ValueError(
            f"{shown_value(choice)} is not auto, none, required or {{type: function, function: {{name: text}}}}"
        )
    return name


def offered(tools: Sequence[Tool], choice: Any, parallel: bool | None = None) -> Offer:
    """What a row is offered that brings these tools and this choice, checked before.

    `parallel`: whether several calls may be made; None: as the job says. Raises ValueError for a call that has to be
    made of a tool that is not there, or whose parameters are no object.
    """
    if choice == NONE:
        return Offer(tool_calls=NONE)
    own: dict[str, Any] = {} if parallel is None else {"parallel": parallel}
    if choice == AUTO:
        return Offer(tools, own or None)
    name = check_choice(choice)
    functions = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    if not functions:
        there = ", ".join(tool["function"]["name"] for tool in tools) or "none"
        wanted = "asks for a call" if name is None else f"asks for a call of {name!r}"
        raise ValueError(f"{wanted}, and the tools are: {there}")
    bound = [{"name": function["name"], "parameters": _parameters(function)} for function in functions]
    return Offer(tools, {"functions": bound, "one": name is not None, **own})


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    """What a call's arguments have to fit: an object always, whether the schema says so or not."""
    given: dict[str, Any] = function.get("parameters") or {**_NO_PARAMETERS}
    if (kind := given.get("type", "object")) != "object":
        raise ValueError(
            f"the parameters of {function['name']!r} are of type {shown_value(kind)}; arguments are an object"
        )
    return {"type": "object", **given}
