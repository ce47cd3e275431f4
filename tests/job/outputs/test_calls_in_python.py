"""Calls written as in Python: what Python would read is read so, what it would not as templates write it, or not."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bulkrun.job.outputs.call import Call, NoCall
from bulkrun.job.outputs.calls_in_python import read_python_call
from bulkrun.job.outputs.tool_calls import Split, split_calls
from tests.job.outputs.test_tool_calls import prose

_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
_keys = st.sampled_from(["city", "from", "max-results", "$top", "é", "a.b"])  # Python has other plans for some
_names = st.sampled_from(["f", "move-to_9", "server.tool", "class", "9x"])
_calls = st.lists(st.tuples(_names, st.dictionaries(_keys, _values, max_size=3)), min_size=1, max_size=3)
_written = st.sampled_from([repr, json.dumps, lambda value: json.dumps(value, ensure_ascii=False)])


def listed(calls: list[tuple[str, dict[str, Any]]], write: Any) -> str:
    parts = (f"{name}({', '.join(f'{k}={write(v)}' for k, v in arguments.items())})" for name, arguments in calls)
    return f"[{', '.join(parts)}]"


def marked(listed: str) -> str:
    return f"<|tool_call_start|>{listed}<|tool_call_end|>"


def value(written: str) -> Any:
    """The value of an argument that is written so."""
    call, end = read_python_call(text := f"f(x={written})", 0)
    assert end == len(text)
    return json.loads(call.arguments)["x"]


def is_refused(written: str) -> bool:
    try:
        value(written)
    except NoCall:
        return True
    return False


@given(calls=_calls, write=_written, before=prose, after=prose)
def test_calls_and_the_text_around_them_come_back(calls: Any, write: Any, before: str, after: str) -> None:
    split = split_calls(f"{before}{marked(listed(calls, write))}{after}", "lfm2")
    assert [(call.name, json.loads(call.arguments)) for call in split.calls] == calls
    assert split.response == ((before + after).strip() or None)


@given(calls=_calls, write=_written, data=st.data())
def test_a_cut_answer_loses_nothing(calls: Any, write: Any, data: st.DataObject) -> None:
    whole = f"So: {marked(listed(calls, write))}"
    text = whole[: data.draw(st.integers(0, len(whole)))]
    split = split_calls(text, "lfm2")
    found = len(split.calls)
    assert [(call.name, json.loads(call.arguments)) for call in split.calls] == calls[:found]
    begin = f"So: {marked(listed(calls[:found], write))}".removesuffix("]<|tool_call_end|>")
    if found and text.startswith(begin):
        assert (split.response or "").removeprefix("So:").strip() in ("", text[len(begin) :].lstrip("]").strip())
    else:
        assert split.response == text


@pytest.mark.filterwarnings("ignore:invalid escape sequence")  # which stay as they are, in Python too
@given(st.lists(st.sampled_from([*"'\"\\nxu041[]{}:, -.ea", "True", "None"]), max_size=14).map("".join))
@example("'\\x41\\101\\n\\''")
def test_what_python_reads_as_well_is_the_same(written: str) -> None:
    try:
        wanted = ast.literal_eval(f"[{written}]")
    except (ValueError, SyntaxError, MemoryError):
        return
    if not is_refused(f"[{written}]"):
        assert repr(value(f"[{written}]")) == repr(wanted)


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ("[True, false, None, null]", [True, False, None, None]),
        ("{'a': true, \"b\": [1.5e3, -2]}", {"a": True, "b": [1500.0, -2]}),
        ("'two\nlines'", "two\nlines"),
        ('"two\nlines"', "two\nlines"),
        (r'"C:\dir\Users"', r"C:\dir\Users"),
        (r"'it\'s \"so\"'", 'it\'s "so"'),
        (r'"\ud83d\ude00"', "😀"),
        (r"'\ud83d\ude00\U0001F600'", "😀😀"),
        (r"'\U00110000'", r"\U00110000"),
        ("'<|tool_call_end|>)]'", "<|tool_call_end|>)]"),
        ("[1, 2, ]", [1, 2]),
    ],
)
def test_values_are_what_models_are_shown_them_as(written: str, wanted: Any) -> None:
    assert value(written) == wanted


@pytest.mark.parametrize(
    "written",
    [
        "", "x", "(1, 2)", "{1, 2}", "{1: 'a'}", "1 + 1", "__import__('os')", "f'{x}'", "b'a'", "'a' 'b'", "Trueish",
        "nan", "NaN", "1e999", "9" * 5000, "'a", "[1", "{'a': 1", "{'a'}", "[1 2]", "[,]", "open=1", "*x",
    ],
)  # fmt: skip
def test_what_is_no_value_of_json_is_refused(written: str) -> None:
    assert is_refused(written)


@pytest.mark.parametrize("opener", ["[", "{'a':", "f(x=", "'", '"\\', "f(x='a', "])
def test_what_runs_in_circles_is_refused_soon(opener: str) -> None:
    text = f"<|tool_call_start|>[f(x={opener * 50_000}"
    assert split_calls(text, "lfm2") == Split(text, [])


def test_values_have_a_greatest_depth() -> None:
    assert value("[" * 100 + "]" * 100)
    assert is_refused("[" * 200 + "]" * 200)


@pytest.mark.parametrize(
    "text",
    [
        "<|tool_call_start|>[]<|tool_call_end|>",
        '<|tool_call_start|>[f("Paris")]<|tool_call_end|>',
        "<|tool_call_start|>f x=1<|tool_call_end|>",
        "<|tool_call_start|>[f(x=g())]<|tool_call_end|>",
        "<|tool_call_start|>[f]<|tool_call_end|>",
        "[f(x=1)]",
    ],
)
def test_what_is_no_call_stays_in_the_text(text: str) -> None:
    assert split_calls(text, "lfm2") == Split(text, [])


def test_prompts_may_ask_lfm2_for_json() -> None:
    """As its documentation has it."""
    text = marked('[{"name": "f", "arguments": {"x": 1}}, {"name": "g"}]') + " Done."
    assert split_calls(text, "lfm2") == Split("Done.", [Call("f", '{"x": 1}'), Call("g", "{}")])


def test_markers_say_enough_where_brackets_are_missing() -> None:
    assert split_calls("<|tool_call_start|>[f(x=1), g()", "lfm2") == Split(
        None, [Call("f", '{"x": 1}'), Call("g", "{}")]
    )
    assert split_calls("<|tool_call_start|>[f(x=1), g(", "lfm2") == Split(", g(", [Call("f", '{"x": 1}')])
    assert split_calls("<|tool_call_start|>f(x=1)<|tool_call_end|>", "lfm2") == Split(None, [Call("f", '{"x": 1}')])
    assert split_calls("<|tool_call_start|>\n[ f( x = 1 , ) , ]\n<|tool_call_end|>", "lfm2").calls
