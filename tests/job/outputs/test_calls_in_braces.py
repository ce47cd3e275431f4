"""Calls as the Gemmas write them: whatever is written reads back, and what is no call stays text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulkrun.job.outputs.call import Call
from bulkrun.job.outputs.tool_calls import Split, split_calls
from bulkrun.request import ToolFormat

Written = list[tuple[str, dict[str, Any]]]
_MARKS: dict[ToolFormat, tuple[str, str, str]] = {
    "gemma4": ("<|tool_call>", '<|"|>', "<tool_call|>"),
    "functiongemma": ("<start_function_call>", "<escape>", "<end_function_call>"),
}
_keys = st.text("abcXYZ_-.09é", min_size=1, max_size=6)
_texts = st.text(st.sampled_from('a1 \n",:{}[]<|') | st.characters(codec="utf-8"), max_size=12)
_texts = _texts.filter(lambda text: '<|"|>' not in text and "<escape>" not in text)  # which end them
_scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _texts
_values = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=3), max_leaves=6
)
_calls = st.lists(st.tuples(_keys, st.dictionaries(_keys, _values, max_size=3)), min_size=1, max_size=3)
_prose = st.text(st.characters(exclude_characters="<", codec="utf-8"), max_size=8)


def _written(value: Any, mark: str) -> str:
    """As the template of Gemma 4 writes values, but for null, which it writes as Python does."""
    if isinstance(value, str):
        return f"{mark}{value}{mark}"
    if isinstance(value, dict):
        return f"{{{_pairs(value, mark)}}}"
    if isinstance(value, list):
        return f"[{','.join(_written(one, mark) for one in value)}]"
    return json.dumps(value)


def _pairs(values: dict[str, Any], mark: str) -> str:
    return ",".join(f"{key}:{_written(value, mark)}" for key, value in values.items())


def _write(form: ToolFormat, calls: Written) -> list[str]:
    begin, mark, end = _MARKS[form]
    return [f"{begin}call:{name}{{{_pairs(arguments, mark)}}}{end}" for name, arguments in calls]


@pytest.mark.parametrize("form", _MARKS)
@given(before=_prose, calls=_calls, after=_prose)
def test_calls_and_the_text_around_them_come_back(form: ToolFormat, before: str, calls: Written, after: str) -> None:
    split = split_calls(f"{before}{''.join(_write(form, calls))}{after}", form)
    assert [(call.name, json.loads(call.arguments)) for call in split.calls] == calls
    assert split.response == ((before + after).strip() or None)


@pytest.mark.parametrize("form", _MARKS)
@given(before=_prose, calls=_calls, data=st.data())
def test_a_cut_answer_loses_nothing(form: ToolFormat, before: str, calls: Written, data: st.DataObject) -> None:
    pieces = _write(form, calls)
    whole = before + "".join(pieces)
    text = whole[: data.draw(st.integers(0, len(whole)))]
    split = split_calls(text, form)
    found = len(split.calls)
    assert [(call.name, json.loads(call.arguments)) for call in split.calls] == calls[:found]
    assert (split.response or "") == (
        (before + text[len(before + "".join(pieces[:found])) :]).strip() if found else text
    )


@pytest.mark.parametrize("form", _MARKS)
@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("{}", {}),
        ("{x:None}", {"x": None}),  # as the template shows it
        ("{x:1e-05}", {"x": 1e-05}),
        ("{ x : 1 , y : [ 1 , ] }", {"x": 1, "y": [1]}),
        ("{@x@:1,y:{@a b@:true}}", {"x": 1, "y": {"a b": True}}),  # as the template declares functions
        ('{x:"a, {b}"}', {"x": "a, {b}"}),  # a text of JSON's
        ("{x:@@,y:@}<tool_call|>@}", {"x": "", "y": "}<tool_call|>"}),
    ],
)
def test_values_are_those_of_json(form: ToolFormat, written: str, arguments: Any) -> None:
    begin, mark, end = _MARKS[form]
    split = split_calls(f"{begin}call: f{written.replace('@', mark)}{end}", form)
    assert [(call.name, json.loads(call.arguments)) for call in split.calls] == [("f", arguments)]
    assert split.response is None


@pytest.mark.parametrize("form", _MARKS)
@pytest.mark.parametrize(
    "written",
    [
        "@call:f{x:1",
        "@call:f{x:so}",
        "@call:f{x:1}} and so on",
        "@call:f{x:1e999}",
        "@call:f{x:NaN}",
        "@call:f{x}",
        "@call:f{[1]}",
        "@call:{x:1}",
        "@call:f(x=1)",
        '@{"name": "f", "arguments": {}}',
        "call:f{x:1}",
        "@call:f{x:" + "[" * 100_000,
        "@call:f{x:" + "{x:" * 100_000,
        "@call:f{" + " " * 200_000,
        "@" * 10_000,
    ],
)
def test_what_is_no_call_stays_in_the_text(form: ToolFormat, written: str) -> None:
    text = written.replace("@", _MARKS[form][0])
    assert split_calls(text, form) == Split(text, [])


@pytest.mark.parametrize("form", _MARKS)
def test_a_call_before_one_that_is_cut_is_a_call(form: ToolFormat) -> None:
    begin, mark, end = _MARKS[form]
    cut = f"{begin}call:g{{x:{mark}a"
    assert split_calls(f"So. {begin}call:f{{}}{end}{cut}", form) == Split(f"So. {cut}", [Call("f", "{}")])
