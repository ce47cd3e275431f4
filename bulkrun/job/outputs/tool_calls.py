"""An answer in two: the tool calls that a model wrote, and the text outside of them. Knows text only.

    hermes       <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them, anywhere
    llama3_json  {"name": ..., "parameters": {...}}, the whole answer or what follows <|python_tag|>; several with ;
                 or the list of lfm2, without its markers
    mistral      [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]name[ARGS]{...}, again and again
    granite      <|tool_call|>[{"name": ..., "arguments": {...}}, ...], perhaps with <|/tool_call|> at the end
    nemotron_json <TOOLCALL>[{"name": ..., "arguments": {...}}, ...]</TOOLCALL>
    cohere       <|START_ACTION|>[{"tool_name": ..., "parameters": {...}}, ...]<|END_ACTION|>
    hunyuan_a13b <tool_calls>[{"name": ..., "arguments": {...}}, ...]</tool_calls>
    lfm2         <|tool_call_start|>[name(key="value", ...), ...]<|tool_call_end|> (`calls_in_python.py`)
    gemma4       <|tool_call>call:name{key:<|"|>value<|"|>, ...}<tool_call|> (`calls_in_braces.py`); so functiongemma
    deepseek_v3, deepseek_v31, kimi_k2  sections of calls (`calls_in_sections.py`)
    qwen3_coder  <tool_call> and each argument between tags (`calls_in_tags.py`); so glm45, minimax_m2, deepseek_v32,
                 deepseek_v4
    harmony      messages of several channels (`channels.py`), one of which is a call

What is no call, or only the beginning of one, stays in the text as it came, and whatever follows a hundred of those.
White space around the text belongs to neither.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from hashlib import blake2b
from typing import NamedTuple

from bulkrun.job.outputs.call import Call, NoCall
from bulkrun.job.outputs.calls_in_braces import read_functiongemma, read_gemma4
from bulkrun.job.outputs.calls_in_json import (
    read_bare_llama,
    read_cohere,
    read_granite,
    read_hermes,
    read_hunyuan,
    read_lfm2,
    read_llama,
    read_mistral,
    read_nemotron,
    without_cohere_markers,
)
from bulkrun.job.outputs.calls_in_sections import read_deepseek, read_kimi
from bulkrun.job.outputs.calls_in_tags import Texts, read_coder, read_dsml, read_glm, read_minimax
from bulkrun.job.outputs.channels import OPENER, read_harmony
from bulkrun.request import ToolFormat

_DEEPSEEK_MARKERS = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
)
# Some models have these as special tokens, which texts do not show.
MARKERS: dict[ToolFormat, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    "granite": ("<|tool_call|>", "<|/tool_call|>"),
    "nemotron_json": ("<TOOLCALL>", "</TOOLCALL>"),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
    "glm45": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "deepseek_v3": _DEEPSEEK_MARKERS,
    "deepseek_v31": _DEEPSEEK_MARKERS,
    "kimi_k2": (
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    "minimax_m2": ("<minimax:tool_call>", "</minimax:tool_call>"),
    "cohere": ("<|START_ACTION|>", "<|END_ACTION|>"),
    "hunyuan_a13b": ("<tool_calls>", "</tool_calls>"),
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
    "deepseek_v32": ("｜DSML｜",),
    "deepseek_v4": ("｜DSML｜",),
    "harmony": tuple(f"<|{name}|>" for name in ("start", "channel", "constrain", "message", "end", "call", "return")),
}
# An output that runs in circles may be nothing but openers, and each failure of json goes through the text before it.
_MOST_MALFORMED = 100
_ID_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"
_ID_LENGTH = 9  # Mistral's templates take ids of nine letters and digits alone, others take any


class Split(NamedTuple):
    """An answer in two: the text outside of calls, None where there is nothing but calls."""

    response: str | None
    calls: list[Call]


_Read = Callable[[str, int], tuple[list[Call], int]]  # calls in a text from a position on, and where they end


def split_calls(text: str, tool_format: ToolFormat, texts: str = "") -> Split:
    """The calls in an answer that ended, and the rest of it. `texts` is that of `request.ToolCalls`."""
    opener, read = _opener_and_reader(tool_format, texts)
    if tool_format == "cohere":
        text = without_cohere_markers(text)
    if tool_format == "llama3_json" and (bare := _split_bare(text)).calls:
        return bare
    if opener not in text:
        opener = _BARE_OPENERS.get(tool_format, opener)
    rest, calls, at, malformed = list[str](), list[Call](), 0, 0
    while (begin := text.find(opener, at)) >= 0 and malformed < _MOST_MALFORMED:
        try:
            found, end = read(text, begin + len(opener))
        except NoCall:
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
    """Without a marker only a whole answer can be calls, of which the last may be cut."""
    try:
        calls, rest = read_bare_llama(text)
    except NoCall:
        return Split(text, [])
    return _split(rest, calls)


def _opener_and_reader(tool_format: ToolFormat, texts: str) -> tuple[str, _Read]:
    """What begins calls, and what reads them from there on."""
    if tool_format in _TAGGED:
        opener, read = _TAGGED[tool_format]
        return opener, partial(read, texts=_texts(texts))
    return _FORMATS[tool_format]


@lru_cache(256)  # of a job whose rows bring their own tools, the latest
def _texts(texts: str) -> Texts:
    of_functions: Texts = json.loads(texts or "{}")
    return of_functions


_FORMATS: dict[ToolFormat, tuple[str, _Read]] = {
    "hermes": ("<tool_call>", read_hermes),
    "llama3_json": ("<|python_tag|>", read_llama),
    "mistral": ("[TOOL_CALLS]", read_mistral),
    "granite": ("<|tool_call|>", read_granite),
    "nemotron_json": ("<TOOLCALL>", read_nemotron),
    "lfm2": ("<|tool_call_start|>", read_lfm2),
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", read_deepseek),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>", read_deepseek),
    "kimi_k2": ("<|tool_calls_section_begin|>", read_kimi),
    "cohere": ("<|START_ACTION|>", read_cohere),
    "hunyuan_a13b": ("<tool_calls>", read_hunyuan),
    "gemma4": ("<|tool_call>", read_gemma4),
    "functiongemma": ("<start_function_call>", read_functiongemma),
    "harmony": (OPENER, read_harmony),
}
# What models take for the beginning at times.
_BARE_OPENERS: dict[ToolFormat, str] = {
    "qwen3_coder": "<function=",
    "deepseek_v3": "<｜tool▁call▁begin｜>",
    "deepseek_v31": "<｜tool▁call▁begin｜>",
    "kimi_k2": "<|tool_call_begin|>",
}
_TAGGED = {
    "qwen3_coder": ("<tool_call>", read_coder),
    "glm45": ("<tool_call>", read_glm),
    "minimax_m2": ("<minimax:tool_call>", read_minimax),
    "deepseek_v32": ("<｜DSML｜function_calls>", read_dsml),
    "deepseek_v4": ("<｜DSML｜tool_calls>", read_dsml),
}
