"""Calls as models write them that put a whole call into JSON: Hermes and Qwen, Llama, Mistral, Granite.

Each reader takes a text and the position after the marker that begins calls; it gives the calls and where they end, and
raises NoCall where there are none.
"""

from __future__ import annotations

import re
from typing import Any

from bulkrun.job.outputs.call import Call, NoCall, after_space, call_of, json_at

_HERMES_END = "</tool_call>"
_NAMED = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?\[ARGS\]\s*")
_CUT = re.compile(r";\s*(\{.*)?", re.DOTALL)  # what follows a whole call where the next is not


def read_hermes(text: str, at: int) -> tuple[list[Call], int]:
    """One call. The end of the answer may stand for that of the call, and for what is missing of its marker."""
    value, at = json_at(text, at)
    at = after_space(text, at)
    if not _HERMES_END.startswith(text[at : at + len(_HERMES_END)]):
        raise NoCall
    return [_call(value, "arguments")], min(len(text), at + len(_HERMES_END))


def read_llama(text: str, at: int) -> tuple[list[Call], int]:
    """Calls with semicolons between them."""
    calls, at = _read_object(text, at)
    while text.startswith(";", after := after_space(text, at)):
        try:
            more, at = _read_object(text, after + 1)
        except NoCall:
            return calls, at
        calls += more
    return calls, at


def read_bare_llama(text: str) -> tuple[list[Call], str]:
    """The calls that a whole answer is, and the last one's text where it is cut: any text may have JSON in it."""
    calls, end = read_llama(text, 0)
    rest = text[end:].strip()
    if rest and not _CUT.fullmatch(rest):
        raise NoCall
    return calls, rest


def read_mistral(text: str, at: int) -> tuple[list[Call], int]:
    """A list of calls, or one with its name before its arguments."""
    if named := _NAMED.match(text, at):
        arguments, at = json_at(text, named.end())
        return [call_of(named[1], arguments)], at
    return _read_list(text, at)


def read_granite(text: str, at: int) -> tuple[list[Call], int]:
    """A list of calls, which a marker may end."""
    calls, at = _read_list(text, at)
    end = after_space(text, at)
    return calls, end + len("<|/tool_call|>") if text.startswith("<|/tool_call|>", end) else at


def _read_object(text: str, at: int) -> tuple[list[Call], int]:
    value, at = json_at(text, at)
    if not isinstance(value, dict) or len({"arguments", "parameters"} & value.keys()) != 1:
        raise NoCall
    return [_call(value, "parameters" if "parameters" in value else "arguments")], at


def _read_list(text: str, at: int) -> tuple[list[Call], int]:
    """Calls in brackets with commas between them; if it is cut, those before."""
    at = after_space(text, at)
    if not text.startswith("[", at):
        raise NoCall
    value, at = json_at(text, at + 1)
    calls = [_call(value, "arguments")]
    while text.startswith(",", after := after_space(text, at)):
        try:
            value, end = json_at(text, after + 1)
            calls.append(_call(value, "arguments"))
        except NoCall:
            return calls, at
        at = end
    return calls, after + 1 if text.startswith("]", after) else at


def _call(value: Any, key: str) -> Call:
    """A call that names its arguments `key`."""
    if not isinstance(value, dict):
        raise NoCall
    return call_of(value.get("name"), value.get(key))
