"""Calls written as models write them and read back, whatever stands around them; what is cut stays text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bulkrun.job.outputs.call import Call
from bulkrun.job.outputs.tool_calls import Split, split_calls, with_ids
from bulkrun.request import ToolFormat

Written = list[tuple[str, dict[str, Any]]]
FORMS: list[ToolFormat] = [
    *("hermes", "llama3_json", "mistral", "granite", "nemotron_json", "lfm2", "deepseek_v3", "deepseek_v31", "kimi_k2"),
    *("cohere", "hunyuan_a13b"),
]
_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
_names = st.text("abcXYZ_-.09", min_size=1, max_size=12)
calls = st.lists(st.tuples(_names, st.dictionaries(st.text(), _values, max_size=3)), min_size=1, max_size=3)
# Text in which no call begins.
prose = st.text(st.characters(exclude_characters="<[{|", codec="utf-8"))


def hermes(calls: Written) -> str:
    blocks = (json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{block}\n</tool_call>" for block in blocks)


def llama(calls: Written) -> str:
    return "; ".join(json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls)


def mistral(calls: Written) -> str:
    return "[TOOL_CALLS] " + json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])


def newer_mistral(calls: Written) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)


def granite(calls: Written) -> str:
    return mistral(calls).replace("[TOOL_CALLS] ", "<|tool_call|>", 1)


def phi(calls: Written) -> str:
    return f"{granite(calls)}<|/tool_call|>"


def nemotron(calls: Written) -> str:
    return f"{granite(calls).replace('<|tool_call|>', '<TOOLCALL>', 1)}</TOOLCALL>"


def cohere(calls: Written) -> str:
    """As Command R7B's template writes them."""
    numbered = enumerate(calls)
    ones = [{"tool_call_id": str(n), "tool_name": name, "parameters": given} for n, (name, given) in numbered]
    lines = ",\n".join(f"    {json.dumps(one, ensure_ascii=False)}" for one in ones)
    return f"<|START_ACTION|>[\n{lines}\n]<|END_ACTION|>"


def hunyuan(calls: Written) -> str:
    return f"{granite(calls).replace('<|tool_call|>', '<tool_calls>', 1)}</tool_calls>"


def jamba(calls: Written) -> str:
    lines = ",\n".join(f"    {json.dumps({'name': name, 'arguments': given})}" for name, given in calls)
    return f"<tool_calls>[\n{lines}\n]</tool_calls>"


def deepseek_3(calls: Written) -> str:
    written = (f"function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```" for name, arguments in calls)
    blocks = "\n".join(f"<｜tool▁call▁begin｜>{one}<｜tool▁call▁end｜>" for one in written)
    return f"<｜tool▁calls▁begin｜>{blocks}<｜tool▁calls▁end｜>"


def deepseek_31(calls: Written) -> str:
    written = (f"{name}<｜tool▁sep｜>{json.dumps(arguments)}" for name, arguments in calls)
    blocks = "".join(f"<｜tool▁call▁begin｜>{one}<｜tool▁call▁end｜>" for one in written)
    return f"<｜tool▁calls▁begin｜>{blocks}<｜tool▁calls▁end｜>"


def kimi(calls: Written) -> str:
    numbered = enumerate(calls)
    written = (f"functions.{name}:{n} <|tool_call_argument_begin|>{json.dumps(given)}" for n, (name, given) in numbered)
    blocks = "".join(f"<|tool_call_begin|>{one}<|tool_call_end|>" for one in written)
    return f"<|tool_calls_section_begin|>{blocks}<|tool_calls_section_end|>"


WRITERS = [
    ("hermes", hermes), ("mistral", mistral), ("mistral", newer_mistral), ("granite", granite), ("granite", phi),
    ("nemotron_json", nemotron), ("deepseek_v3", deepseek_3), ("deepseek_v31", deepseek_31), ("kimi_k2", kimi),
    ("cohere", cohere), ("hunyuan_a13b", hunyuan), ("hunyuan_a13b", jamba),
]  # fmt: skip


def read(split: Split) -> Written:
    return [(call.name, json.loads(call.arguments)) for call in split.calls]


@pytest.mark.parametrize(("form", "write"), WRITERS)
@given(before=prose, calls=calls, after=prose)
def test_calls_and_the_text_around_them_come_back(
    form: ToolFormat, write: Any, before: str, calls: Written, after: str
) -> None:
    split = split_calls(f"{before}{write(calls)}{after}", form)
    assert (read(split), split.response) == (calls, (before + after).strip() or None)


@given(before=prose, calls=calls, is_marked=st.booleans())
@example(before="", calls=[("f", {"x": "<|python_tag|>"})], is_marked=False)
def test_llamas_calls_are_the_whole_answer_or_follow_their_marker(before: str, calls: Written, is_marked: bool) -> None:
    split = split_calls(f"{before}<|python_tag|>{llama(calls)}" if is_marked else llama(calls), "llama3_json")
    assert (read(split), split.response) == (calls, (before.strip() or None) if is_marked else None)


@pytest.mark.parametrize("before", ["", "<|python_tag|>", "\n"])
def test_small_llamas_may_write_a_list_as_in_python(before: str) -> None:
    """As Meta documents it for those of 3.2, whose template asks for JSON."""
    split = split_calls(f"{before}[get_user(user_id=7890, special='black'), now()]", "llama3_json")
    assert split == Split(None, [Call("get_user", '{"user_id": 7890, "special": "black"}'), Call("now", "{}")])


@pytest.mark.parametrize("form", FORMS)
@given(text=prose | st.text())
def test_a_text_without_calls_is_as_it_came(form: ToolFormat, text: str) -> None:
    assert split_calls(text, form) == Split(text, [])


@pytest.mark.parametrize(("form", "write"), [*WRITERS, ("llama3_json", llama)])
@given(before=prose, calls=calls, data=st.data())
def test_a_cut_answer_loses_nothing(
    form: ToolFormat, write: Any, before: str, calls: Written, data: st.DataObject
) -> None:
    """Whole calls are those that were written, in their order; what is left is the text that they leave."""
    whole = (before if form != "llama3_json" else "") + write(calls)
    text = whole[: data.draw(st.integers(0, len(whole)))]
    split = split_calls(text, form)
    assert read(split) == calls[: len(split.calls)]
    if not split.calls:
        assert split.response == text
    elif form == "hermes":
        written = hermes(calls[: len(split.calls)])
        left = text.replace(written, "") if written in text else text[: text.index("<tool_call>")]
        assert "".join((split.response or "").split()) == "".join(left.split())


MALFORMED = [
    ("hermes", "<tool_call>\n{'name': 'f'}\n</tool_call>"),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {}} and more\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"arguments": {}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"x": 1e999}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "", "arguments": {}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"x": NaN}}\n</tool_call>'),
    ("hermes", "<tool_call>" + "[" * 100_000),
    ("llama3_json", '{"name": "f"}'),
    ("llama3_json", '{"name": "f", "parameters": {}} is what I would call'),
    ("llama3_json", 'I call {"name": "f", "parameters": {}}'),
    ("llama3_json", '<|python_tag|>search.call(query="x")'),
    ("llama3_json", "[f(x=1)] is what I would call"),
    ("llama3_json", "I call [f(x=1)]"),
    ("llama3_json", "[f(x)]"),
    ("llama3_json", "[1, 2]"),
    ("mistral", "[TOOL_CALLS] []"),
    ("mistral", '[TOOL_CALLS] [{"name": "f"'),
    ("mistral", "[TOOL_CALLS]f[ARGS]{"),
    ("mistral", '[TOOL_CALLS]f{"x": 1}'),
    ("granite", "<|tool_call|>[]<|/tool_call|>"),
    ("granite", '<|tool_call|>{"name": "f"}'),
    ("nemotron_json", "<TOOLCALL>[]</TOOLCALL>"),
    ("nemotron_json", '<TOOLCALL>[{"name": "f", "arguments": "x"}]</TOOLCALL>'),
    ("nemotron_json", '<TOOLCALL>[{"name": "f", "arguments": "{} and more"}]</TOOLCALL>'),
    ("nemotron_json", '<TOOLCALL>[{"name": "f", "arguments": "[1]"}]</TOOLCALL>'),
    ("cohere", "<|START_ACTION|>[]<|END_ACTION|>"),
    ("cohere", '<|START_ACTION|>[{"name": "f", "parameters": {}}]<|END_ACTION|>'),
    ("cohere", '<|START_ACTION|>[{"tool_name": "f", "parameters": "x"}]<|END_ACTION|>'),
    ("cohere", '<|START_ACTION|>{"tool_name": "f", "parameters": {}}'),
    ("hunyuan_a13b", "<tool_calls>[]</tool_calls>"),
    ("hunyuan_a13b", '<tool_calls>{"name": "f", "arguments": {}}</tool_calls>'),
    ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"),
    (
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>[1]<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{} so"),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>0<|tool_call_argument_begin|>{}<|tool_call_end|>"),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_calls_section_end|>"),
    ("kimi_k2", f"<|tool_calls_section_begin|>{' ' * 200_000}f:0"),
    ("deepseek_v3", f"<｜tool▁call▁begin｜>f<｜tool▁sep｜>{{}}{' ' * 200_000}<"),
]


@pytest.mark.parametrize(("form", "text"), MALFORMED)
def test_what_is_no_call_stays_in_the_text(form: ToolFormat, text: str) -> None:
    assert split_calls(text, form) == Split(text, [])


@pytest.mark.parametrize(
    ("form", "text", "rest"),
    [
        ("llama3_json", '{"name": "f", "parameters": {}}; {"name": "g", "par', '; {"name": "g", "par'),
        ("llama3_json", '{"name": "f", "parameters": {}};', ";"),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}; {"na', '; {"na'),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g"', ', {"name": "g"'),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}', None),
        ("mistral", '[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[ARGS]{"x"', '[TOOL_CALLS]g[ARGS]{"x"'),
        ("granite", '<|tool_call|>[{"name": "f"}, ', ","),
        ("nemotron_json", '<TOOLCALL>[{"name": "f"}, {"na', ', {"na'),
        ("nemotron_json", '<TOOLCALL>[{"name": "f"}]</TOOL', "</TOOL"),
        ("cohere", '<|START_ACTION|>[{"tool_name": "f"}, {"tool_na', ', {"tool_na'),
        ("cohere", '<|START_ACTION|>[{"tool_name": "f"}]<|END_', "<|END_"),
        ("hunyuan_a13b", '<tool_calls>[{"name": "f"}, {"na', ', {"na'),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}", None),
        ("deepseek_v31", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>", None),
        ("kimi_k2", "<|tool_call_begin|>f:12<|tool_call_argument_begin|>{}<|tool_call_end|>", None),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
            "<|tool_call_begin|>functions.g:1<|tool_",
            "<|tool_call_begin|>functions.g:1<|tool_",
        ),
    ],
)
def test_calls_before_one_that_is_cut_are_calls(form: ToolFormat, text: str, rest: str | None) -> None:
    assert split_calls(text, form) == Split(rest, [Call("f", "{}")])


@pytest.mark.parametrize(
    "written", ['[{"name": "f", "arguments": "{\\"x\\": 1}"}]', '{"name": "f", "arguments": {"x": 1}}']
)
def test_nemotron_may_quote_arguments_or_forget_brackets(written: str) -> None:
    """Its prompt shows them quoted, and NVIDIA's own reader takes both."""
    assert split_calls(f"<TOOLCALL>{written}</TOOLCALL> So.", "nemotron_json") == Split("So.", [Call("f", '{"x": 1}')])


@pytest.mark.parametrize("word", ["RESPONSE", "TEXT"])
@pytest.mark.parametrize("call", ["", '<|START_ACTION|>[{"tool_name": "f"}]<|END_ACTION|>'])
def test_commands_answer_is_without_its_markers(word: str, call: str) -> None:
    """They may be no special tokens; one that the answer only spells is part of it."""
    said = f"Write <|END_{word}|>, then <|START_{word}|>. So."
    wanted = [Call("f", "{}")] if call else []
    for before, after in (("", ""), (f"<|START_{word}|>", f"<|END_{word}|>"), (f"\n<|START_{word}|>", "")):
        assert split_calls(f"{before}{said}{after}", "cohere") == Split(said, [])
    assert split_calls(f"<|START_{word}|>{said}{call}", "cohere") == Split(said, wanted)


@pytest.mark.parametrize("none", ["[]", "0", '""', "false"])
def test_arguments_that_are_no_object_are_none(none: str) -> None:
    assert not split_calls(f'<tool_call>{{"name": "f", "arguments": {none}}}</tool_call>', "hermes").calls
    assert split_calls('<tool_call>{"name": "f", "arguments": null}</tool_call>', "hermes").calls == [Call("f", "{}")]


def test_calls_behind_very_many_malformed_ones_stay_in_the_text() -> None:
    good = '<tool_call>{"name": "f"}</tool_call>'
    for number in (99, 100):
        split = split_calls(f"{good}{'<tool_call>' * number}{good}", "hermes")
        assert len(split.calls) == (2 if number < 100 else 1)
        assert split.response == "<tool_call>" * number + ("" if number < 100 else good)


def test_a_good_call_beside_a_malformed_one_is_a_call_and_the_other_stays() -> None:
    bad, good = "<tool_call>\n{broken\n</tool_call>", '<tool_call>{"name": "f", "arguments": {"é": "</tool_call>"}}'
    assert split_calls(f"Well. {bad}\n{good}</tool_call>\n", "hermes") == Split(
        f"Well. {bad}", [Call("f", '{"é": "</tool_call>"}')]
    )
    assert split_calls(good, "hermes").calls, "the end of the answer may stand for that of the call"


def test_a_function_without_parameters_is_called_without_arguments() -> None:
    assert split_calls('<tool_call>\n{"name": "now"}\n</tool_call>', "hermes").calls == [Call("now", "{}")]
    assert split_calls('<tool_call>\n{"name": "now"}\n</tool', "hermes") == Split(None, [Call("now", "{}")])
    assert split_calls("[TOOL_CALLS]now[CALL_ID]abc[ARGS]{}", "mistral").calls == [Call("now", "{}")]


def test_half_a_surrogate_pair_stays_an_escape_in_the_arguments() -> None:
    [call] = split_calls('<tool_call>{"name": "f", "arguments": {"x": "\\ud800é"}}</tool_call>', "hermes").calls
    assert call.arguments == '{"x": "\\ud800\\u00e9"}'


def test_ids_are_those_of_the_place_and_such_as_mistral_takes() -> None:
    made = with_ids([["f", "{}"], ["f", "{}"]], "row", 0)
    assert made == with_ids([Call("f", "{}"), Call("f", "{}")], "row", 0)
    others = with_ids([["f", "{}"]], "row", 1) + with_ids([["f", "{}"]], "other", 0)
    ids = [call["id"] for call in [*made, *others]]
    assert len({*ids}) == 4 and all(len(id_) == 9 and id_.isalnum() for id_ in ids)
