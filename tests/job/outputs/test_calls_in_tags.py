"""Calls with each argument between tags: whatever is written reads back, with the types that the tools tell."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulkrun.job.outputs.tool_calls import Split, split_calls
from bulkrun.request import ToolFormat

_BY_SCHEMA: list[ToolFormat] = ["qwen3_coder", "glm45", "minimax_m2"]  # which tells texts there
_FORMS: list[ToolFormat] = [*_BY_SCHEMA, "deepseek_v32", "deepseek_v4"]
TEXTS = json.dumps({"f": {"text": []}, "g-1": {}})
_names = st.sampled_from(["f", "g-1"])
_ends = ["</parameter></function>", "</parameter> <parameter=b>", "</arg_value></tool_call>", "</parameter></invoke>"]
_tags = st.sampled_from([*_ends, "</｜DSML｜parameter></｜DSML｜invoke>", "True"])
_json = st.integers() | st.booleans() | st.none() | st.lists(st.integers() | st.text("ab\n<é"), max_size=3)
# A text keeps its line breaks and its tags, but for the one that ends it.
_texts = st.text(st.sampled_from('a1 \n"<é{[') | st.characters(codec="utf-8"), max_size=12)
_arguments = st.fixed_dictionaries({}, optional={"number": _json, "text": _texts})
_calls = st.lists(st.tuples(_names, _arguments), min_size=1, max_size=3)
_tagged = st.lists(st.tuples(_names, st.fixed_dictionaries({"number": st.lists(_json | _tags)})), max_size=2)


def _written(value: Any, *, quotes: bool) -> str:
    return json.dumps(value, ensure_ascii=False) if quotes else value


def _coder(name: str, arguments: dict[str, Any], texts: list[str]) -> str:
    lines = (f"<parameter={k}>\n{_written(v, quotes=k not in texts)}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{''.join(lines)}</function>\n</tool_call>"


def _glm(name: str, arguments: dict[str, Any], texts: list[str]) -> str:
    pairs = (
        f"<arg_key>{k}</arg_key>\n<arg_value>{_written(v, quotes=k not in texts)}</arg_value>\n"
        for k, v in arguments.items()
    )
    return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"


def _minimax_invoke(name: str, arguments: dict[str, Any], texts: list[str]) -> str:
    lines = (f'<parameter name="{k}">{_written(v, quotes=k not in texts)}</parameter>\n' for k, v in arguments.items())
    return f'<invoke name="{name}">\n{"".join(lines)}</invoke>\n'


def _dsml_invoke(name: str, arguments: dict[str, Any], texts: list[str]) -> str:
    lines = (
        f'<｜DSML｜parameter name="{k}" string="{"true" if k in texts else "false"}">'
        f"{_written(v, quotes=k not in texts)}</｜DSML｜parameter>\n"
        for k, v in arguments.items()
    )
    return f'<｜DSML｜invoke name="{name}">\n{"".join(lines)}</｜DSML｜invoke>\n'


_SECTIONS: dict[ToolFormat, tuple[str, Any, str]] = {
    "minimax_m2": ("<minimax:tool_call>", _minimax_invoke, "</minimax:tool_call>"),
    "deepseek_v32": ("<｜DSML｜function_calls>", _dsml_invoke, "</｜DSML｜function_calls>"),
    "deepseek_v4": ("<｜DSML｜tool_calls>", _dsml_invoke, "</｜DSML｜tool_calls>"),
}


def _section(form: ToolFormat, calls: list[tuple[str, dict[str, Any]]], texts: list[str]) -> str:
    begin, invoke, end = _SECTIONS[form]
    return f"{begin}\n{''.join(invoke(name, arguments, texts) for name, arguments in calls)}{end}"


def _write(form: ToolFormat, name: str, arguments: dict[str, Any], texts: list[str]) -> str:
    """One call, in a section of its own where calls have one."""
    if form in _SECTIONS:
        return _section(form, [(name, arguments)], texts)
    return (_coder if form == "qwen3_coder" else _glm)(name, arguments, texts)


_ENDS = {"qwen3_coder": "</function>", "minimax_m2": "</invoke>", "deepseek_v32": "</｜DSML｜invoke>"}
_ENDS["deepseek_v4"] = _ENDS["deepseek_v32"]


@pytest.mark.parametrize("form", _FORMS)
@given(calls=_calls, tagged=_tagged, before=st.text("ab \n", max_size=5))
def test_what_is_written_reads_back(form: ToolFormat, calls: list[Any], tagged: list[Any], before: str) -> None:
    """What stands in the quotes of JSON ends nothing."""
    texts: dict[str, dict[str, list[str]]] = json.loads(TEXTS)
    wanted = [(n, a if n == "f" else {k: v for k, v in a.items() if k != "text"}) for n, a in calls + tagged]
    text = before + "\n".join(_write(form, name, arguments, [*texts[name]]) for name, arguments in wanted)
    split = split_calls(text, form, TEXTS)
    assert [(call.name, json.loads(call.arguments)) for call in split.calls] == wanted
    assert split.response == (before.strip() or None)


@pytest.mark.parametrize("form", _FORMS)
@given(data=st.data(), calls=_calls)
def test_what_is_cut_loses_nothing(form: ToolFormat, data: st.DataObject, calls: Any) -> None:
    pieces = [_write(form, name, arguments, ["number", "text"]) for name, arguments in _as_texts(calls)]
    cut = "".join(pieces)[: data.draw(st.integers(0, sum(map(len, pieces))))]
    both: dict[str, list[str]] = {"number": [], "text": []}
    split = split_calls(cut, form, json.dumps({"f": both, "g-1": both}))
    found = split.calls
    assert [(call.name, json.loads(call.arguments)) for call in found] == _as_texts(calls)[: len(found)]
    end = sum(map(len, pieces[: len(found)]))
    if end > len(cut):  # the last call's outer tag may be missing, and what there is of it is text
        end = cut.rindex(_ENDS[form]) + len(_ENDS[form])
    assert (split.response or "") == (cut[end:].strip() if found else cut)
    assert len(cut) - end < max(map(len, pieces)), "every whole call is found"


def _as_texts(calls: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    return [(name, {key: json.dumps(value) for key, value in arguments.items()}) for name, arguments in calls]


def test_a_number_is_a_text_where_the_tool_says_so() -> None:
    written = _coder("f", {"zip": "75001", "days": "3", "note": "true", "odd": "x: 1"}, ["zip", "days", "note", "odd"])
    [call] = split_calls(written, "qwen3_coder", '{"f": {"zip": []}}').calls
    assert json.loads(call.arguments) == {"zip": "75001", "days": 3, "note": True, "odd": "x: 1"}
    [call] = split_calls(written, "qwen3_coder").calls
    assert json.loads(call.arguments)["zip"] == 75001, "nobody said that it is a text"


@pytest.mark.parametrize("form", _SECTIONS)
@given(calls=_calls, data=st.data())
def test_a_section_has_several_calls_and_keeps_those_that_are_whole(
    form: ToolFormat, calls: Any, data: st.DataObject
) -> None:
    wanted = _as_texts(calls)
    whole = _section(form, wanted, ["number", "text"])
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    both: dict[str, list[str]] = {"number": [], "text": []}
    split = split_calls(cut, form, json.dumps({"f": both, "g-1": both}))
    found = [(call.name, json.loads(call.arguments)) for call in split.calls]
    assert found == wanted[: len(found)] and len(found) == cut.count(_ENDS[form])
    left = cut if not found else cut[cut.rindex(_ENDS[form]) + len(_ENDS[form]) :].replace(_SECTIONS[form][2], "")
    assert (split.response or "") == (left.strip() if found else cut)


@pytest.mark.parametrize("string", [' string="true"', ' string="false"', ""])
@pytest.mark.parametrize(
    ("written", "otherwise"),
    [("75001", 75001), ("null", None), ('"so"', "so"), ("[1]", [1]), ("so: [1", "so: [1"), ("True", True), (" 1", 1)],
)
def test_of_deepseek_the_tag_tells_what_is_a_text(string: str, written: str, otherwise: Any) -> None:
    """Whatever the tool's schema says; what it calls no text and is no JSON is one all the same, as in vLLM."""
    parameter = f'<｜DSML｜parameter name="x"{string}>{written}</｜DSML｜parameter>'
    text = f'<｜DSML｜function_calls><｜DSML｜invoke name="f">{parameter}</｜DSML｜invoke></｜DSML｜function_calls>'
    [call] = split_calls(text, "deepseek_v32", '{"f": {"x": ["null"]}}').calls
    assert json.loads(call.arguments) == {"x": written if "true" in string else otherwise}


@pytest.mark.parametrize("form", _BY_SCHEMA)
@pytest.mark.parametrize(
    ("kinds", "written", "wanted"),
    [
        (["null"], "75001", "75001"),
        (["null"], '"so"', '"so"'),
        (["null"], "null", None),
        (["null", "string"], "75001", "75001"),
        (["null", "string"], "True", "True"),
        (["null", "string"], "null", None),
        (["null", "string"], "None", None),
        (["null", "string"], '"75001"', "75001"),  # as a grammar has it written
        (["null", "string"], '{"a": 1}', '{"a": 1}'),
        (["integer", "string"], "75001", 75001),
        (["integer", "string"], "5.0", 5.0),
        (["integer", "string"], "5.10", "5.10"),
        (["string"], "[1]", "[1]"),
        (["array", "string"], "[1]", [1]),
        (None, "NaN", "NaN"),  # no number that JSON could give back
        (None, "[1e999]", "[1e999]"),
    ],
)
def test_json_of_another_kind_than_the_tool_says_is_a_text(
    form: ToolFormat, kinds: list[str] | None, written: str, wanted: Any
) -> None:
    texts = {} if kinds is None else {"f": {"x": kinds}}
    [call] = split_calls(_write(form, "f", {"x": written}, ["x"]), form, json.dumps(texts)).calls
    assert json.loads(call.arguments) == {"x": wanted}


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("qwen3_coder", "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>"),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"),
        ("minimax_m2", '<minimax:tool_call><invoke name="f"><parameter name="a">1</parameter></invoke>'),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name=f>\n<parameter name="a">1</parameter>\n</invoke>'),
        (
            "deepseek_v4",
            '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="false">'
            "1</｜DSML｜parameter>\n</｜DSML｜invoke>\n",
        ),
    ],
)
def test_what_models_leave_out_is_no_matter(form: ToolFormat, text: str) -> None:
    split = split_calls(text, form)
    assert [(call.name, call.arguments) for call in split.calls] == [("f", '{"a": 1}')] and split.response is None


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>"),
        ("qwen3_coder", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
        ("qwen3_coder", "<function=" * 100_000),
        ("glm45", "<tool_call>f\n<arg_key>a</arg_key>\n</tool_call>"),
        ("glm45", "<tool_call>" * 100_000),
        ("glm45", '<tool_call>{"name": "f"}</tool_call>'),
        ("glm45", "<tool_call>well, no</tool_call>"),
        (
            "minimax_m2",
            '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1\n</invoke>\n</minimax:tool_call>',
        ),
        ("minimax_m2", '<minimax:tool_call>\n{"name": "f", "arguments": {}}\n</minimax:tool_call>'),
        ("minimax_m2", '<invoke name="f">\n</invoke>'),
        ("minimax_m2", "<minimax:tool_call>" * 100_000),
        ("minimax_m2", f"<minimax:tool_call>{' ' * 200_000}<invoke"),
        ("deepseek_v32", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n{broken</｜DSML｜invoke>'),
        ("deepseek_v32", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'),
    ],
)
def test_what_is_no_call_stays_in_the_text(form: ToolFormat, text: str) -> None:
    assert split_calls(text, form) == Split(text, [])
