"""Calls as models write them that put a whole call into JSON, or into Python, one or a list of them.

Hermes and Qwen, Llama, Mistral, Granite, Nemotron, Cohere, Hunyuan; LFM2 and the small Llamas, which write lists of
calls as in Python.

Each reader takes a text and the position after the marker that begins calls; it gives the calls and where they end, and
raises NoCall where there are none.
"""

from __future__ import annotations

import re
from typing import Any

from bulkrun.job.outputs.call import Call, NoCall, ReadCall, after_space, call_of, json_at
from bulkrun.job.outputs.calls_in_python import read_python_call

_HERMES_END = "</tool_call>"
_NAMED = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?\[ARGS\]\s*")
_COHERE_MARKERS = re.compile(r"\A\s*<\|START_(?:RESPONSE|TEXT)\|>|<\|END_(?:RESPONSE|TEXT)\|>\s*\Z")
_CUT = re.compile(r";\s*(\{.*)?", re.DOTALL)  # what follows a whole call where the next is not


def read_hermes(text: str, at: int) -> tuple[list[Call], int]:
    """One call. The end of the answer may stand for that of the call, and for what is missing of its marker."""
    value, at = json_at(text, at)
    at = after_space(text, at)
    if not _HERMES_END.startswith(text[at : at + len(_HERMES_END)]):
        raise NoCall
    return [_call(value, "arguments")], min(len(text), at + len(_HERMES_END))


def read_llama(text: str, at: int) -> tuple[list[Call], int]:
    """Calls with semicolons between them, or the list that the small ones of 3.2 write: [f(x=1), g()]."""
    if text.startswith("[", after_space(text, at)):
        return _read_list(text, at, read_python_call)
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
    return _read_list(text, at, _json_call)


def read_granite(text: str, at: int) -> tuple[list[Call], int]:
    """A list of calls, which a marker may end."""
    calls, at = _read_list(text, at, _json_call)
    return calls, _after(text, at, "<|/tool_call|>")


def read_nemotron(text: str, at: int) -> tuple[list[Call], int]:
    """A list of calls, whose brackets may be missing: the markers say enough."""
    calls, at = _read_items(text, _after(text, at, "["), _nemotron_call)
    return calls, _after(text, at, "</TOOLCALL>")


def read_cohere(text: str, at: int) -> tuple[list[Call], int]:
    """A list of calls with names of its own for what they have; the numbers that it gives them say nothing."""
    calls, at = _read_list(text, at, _cohere_call)
    return calls, _after(text, at, "<|END_ACTION|>")


def without_cohere_markers(text: str) -> str:
    """An answer without the markers around it, which are texts in some tokenizers."""
    return _COHERE_MARKERS.sub("", text)


def read_hunyuan(text: str, at: int) -> tuple[list[Call], int]:
    """A list of calls, which a marker ends."""
    calls, at = _read_list(text, at, _json_call)
    return calls, _after(text, at, "</tool_calls>")


def read_lfm2(text: str, at: int) -> tuple[list[Call], int]:
    """A list of calls as in Python, or in JSON where the prompt asks for that. Its brackets may be missing."""
    calls, at = _read_items(text, _after(text, at, "["), _lfm2_call)
    return calls, _after(text, at, "<|tool_call_end|>")


def _read_object(text: str, at: int) -> tuple[list[Call], int]:
    value, at = json_at(text, at)
    if not isinstance(value, dict) or len({"arguments", "parameters"} & value.keys()) != 1:
        raise NoCall
    return [_call(value, "parameters" if "parameters" in value else "arguments")], at


def _read_list(text: str, at: int, read: ReadCall) -> tuple[list[Call], int]:
    """Calls in brackets."""
    at = after_space(text, at)
    if not text.startswith("[", at):
        raise NoCall
    return _read_items(text, at + 1, read)


def _read_items(text: str, at: int, read: ReadCall) -> tuple[list[Call], int]:
    """Calls with commas between them, and the bracket that ends them; if they are cut, those before."""
    call, at = read(text, at)
    calls = [call]
    while text.startswith(",", after := after_space(text, at)):
        try:
            call, at = read(text, after + 1)
        except NoCall:
            return calls, at
        calls.append(call)
    return calls, after + 1 if text.startswith("]", after) else at


def _json_call(text: str, at: int) -> tuple[Call, int]:
    value, at = json_at(text, at)
    return _call(value, "arguments"), at


def _cohere_call(text: str, at: int) -> tuple[Call, int]:
    value, at = json_at(text, at)
    return _call(value, "parameters", name="tool_name"), at


def _nemotron_call(text: str, at: int) -> tuple[Call, int]:
    """The prompt shows arguments in quotes, and some come so: as a text that is JSON."""
    value, at = json_at(text, at)
    if isinstance(value, dict) and isinstance(arguments := value.get("arguments"), str):
        value["arguments"], end = json_at(arguments, 0)
        if after_space(arguments, end) < len(arguments):
            raise NoCall
    return _call(value, "arguments"), at


def _lfm2_call(text: str, at: int) -> tuple[Call, int]:
    return (_json_call if text.startswith("{", after_space(text, at)) else read_python_call)(text, at)


def _after(text: str, at: int, marker: str) -> int:
    """The position behind a marker, or the same one where it is missing."""
    begin = after_space(text, at)
    return begin + len(marker) if text.startswith(marker, begin) else at


def _call(value: Any, key: str, name: str = "name") -> Call:
    """A call that names its arguments `key`."""
    if not isinstance(value, dict):
        raise NoCall
    return call_of(value.get(name), value.get(key))
