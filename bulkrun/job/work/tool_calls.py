"""Calls of tools in an answer: what a model wrote as calls, and the text outside of them. Knows text only.

    hermes       <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them, anywhere
    llama3_json  {"name": ..., "parameters": {...}}, the whole answer or what follows <|python_tag|>; several with ;
    mistral      [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]name[ARGS]{...}, again and again
    granite      <|tool_call|>[{"name": ..., "arguments": {...}}, ...], perhaps with <|/tool_call|> at the end

What is no call, or only the beginning of one, stays in the text as it came, and whatever follows a hundred of those.
White space around the text belongs to neither.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from bulkrun.data.types.json_types import is_unicode
from bulkrun.request import ToolFormat

# Some models have these as special tokens, which texts do not show.
MARKERS: dict[ToolFormat, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    "granite": ("<|tool_call|>", "<|/tool_call|>"),
}
_SPACE = re.compile(r"\s*")
_NAMED = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?\[ARGS\]\s*")
# An output that runs in circles may be nothing but openers, and each failure of json goes through the text before it.
_MOST_MALFORMED = 100
_CUT = re.compile(r";\s*(\{.*)?", re.DOTALL)  # what follows a whole call where the next is not
_ID_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"
_ID_LENGTH = 9  # Mistral's templates take ids of nine letters and digits alone, others take any


class Call(NamedTuple):
    """A call of a tool; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


class Split(NamedTuple):
    """An answer in two: the text outside of calls, None where there is nothing but calls."""

    response: str | None
    calls: list[Call]


class _NoCall(ValueError):
    """What stands here is not a call."""


_Read = Callable[[str, int], tuple[list[Call], int]]  # calls in a text from a position on, and where they end


def split_calls(text: str, form: ToolFormat) -> Split:
    """The calls in an answer that ended, and the rest of it."""
    opener, read = _FORMS[form]
    if form == "llama3_json" and opener not in text:
        return _split_bare(text)
    rest, calls, at, malformed = list[str](), list[Call](), 0, 0
    while (begin := text.find(opener, at)) >= 0 and malformed < _MOST_MALFORMED:
        try:
            found, end = read(text, begin + len(opener))
        except _NoCall:
            found, end, malformed = [], begin + len(opener), malformed + 1
            rest.append(text[at:end])
        else:
            rest.append(text[at:begin] if text[at:begin].strip() else "")
        calls += found
        at = end
    return _split("".join([*rest, text[at:]]), calls) if calls else Split(text, [])


def with_ids(calls: Sequence[Sequence[str]], row_id: str, sample: int) -> list[dict[str, str]]:
    """Calls as the column `tool_calls` has them. Their ids are a function of the row's id, sample and number."""
    return [
        {"id": _call_id(f"{row_id}|{sample}|{number}"), "name": name, "arguments": arguments}
        for number, (name, arguments) in enumerate(calls)
    ]


def _call_id(place: str) -> str:
    number = int.from_bytes(blake2b(place.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
    return "".join(_ID_LETTERS[number // len(_ID_LETTERS) ** k % len(_ID_LETTERS)] for k in range(_ID_LENGTH))


def _split(rest: str, calls: list[Call]) -> Split:
    return Split(rest.strip() or None, calls)


def _split_bare(text: str) -> Split:
    """Without a marker only a whole answer can be calls, of which the last may be cut: any text may have JSON in it."""
    try:
        calls, end = _read_llama(text, 0)
    except _NoCall:
        return Split(text, [])
    rest = text[end:].strip()
    return _split(rest, calls) if not rest or _CUT.fullmatch(rest) else Split(text, [])


def _read_hermes(text: str, at: int) -> tuple[list[Call], int]:
    """One call. The end of the answer may stand for that of the call."""
    value, at = _json_at(text, at)
    at = _after_space(text, at)
    if not text.startswith("</tool_call>", at) and at < len(text):
        raise _NoCall
    return [_call(value, "arguments")], min(len(text), at + len("</tool_call>"))


def _read_llama(text: str, at: int) -> tuple[list[Call], int]:
    """Calls with semicolons between them."""
    calls, at = _read_object(text, at)
    while text.startswith(";", after := _after_space(text, at)):
        try:
            more, at = _read_object(text, after + 1)
        except _NoCall:
            return calls, at
        calls += more
    return calls, at


def _read_object(text: str, at: int) -> tuple[list[Call], int]:
    value, at = _json_at(text, at)
    if not isinstance(value, dict) or len({"arguments", "parameters"} & value.keys()) != 1:
        raise _NoCall
    return [_call(value, "parameters" if "parameters" in value else "arguments")], at


def _read_mistral(text: str, at: int) -> tuple[list[Call], int]:
    """A list of calls, or one with its name before its arguments."""
    if named := _NAMED.match(text, at):
        arguments, at = _json_at(text, named.end())
        return [_call({"name": named[1], "arguments": arguments}, "arguments")], at
    return _read_list(text, at)


def _read_granite(text: str, at: int) -> tuple[list[Call], int]:
    """A list of calls, which a marker may end."""
    calls, at = _read_list(text, at)
    end = _after_space(text, at)
    return calls, end + len("<|/tool_call|>") if text.startswith("<|/tool_call|>", end) else at


def _read_list(text: str, at: int) -> tuple[list[Call], int]:
    """Calls in brackets with commas between them; if it is cut, those before."""
    at = _after_space(text, at)
    if not text.startswith("[", at):
        raise _NoCall
    value, at = _json_at(text, at + 1)
    calls = [_call(value, "arguments")]
    while text.startswith(",", after := _after_space(text, at)):
        try:
            value, end = _json_at(text, after + 1)
            calls.append(_call(value, "arguments"))
        except _NoCall:
            return calls, at
        at = end
    return calls, after + 1 if text.startswith("]", after) else at


_FORMS: dict[ToolFormat, tuple[str, _Read]] = {
    "hermes": ("<tool_call>", _read_hermes),
    "llama3_json": ("<|python_tag|>", _read_llama),
    "mistral": ("[TOOL_CALLS]", _read_mistral),
    "granite": ("<|tool_call|>", _read_granite),
}


def _call(value: Any, key: str) -> Call:
    """A call that names its arguments `key`: an object, or nothing at all."""
    name = value.get("name") if isinstance(value, dict) else None
    arguments = value.get(key) if isinstance(value, dict) else None
    arguments = {} if arguments is None else arguments
    if not isinstance(name, str) or not name or not is_unicode(name) or not isinstance(arguments, dict):
        raise _NoCall
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        return Call(name, text if is_unicode(text) else json.dumps(arguments))
    except (ValueError, RecursionError):  # a number too large for a double
        raise _NoCall from None


def _json_at(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that stands at a position, after white space, and where it ends."""
    try:
        return json.JSONDecoder().raw_decode(text, _after_space(text, at))
    except (ValueError, RecursionError):
        raise _NoCall from None


def _after_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    assert space is not None, "it matches nothing too"
    return space.end()
