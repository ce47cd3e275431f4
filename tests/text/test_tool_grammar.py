"""Calls that have to be made: whatever a model chooses under the masks reads back as calls that fit the functions."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest
import tokenizers

from bulkrun.job.jobfile.tool_calls import bound_calls, needs_texts
from bulkrun.job.jobfile.tools import offered
from bulkrun.job.outputs.bound_calls import BoundCallsParser
from bulkrun.job.outputs.channels import split_channels
from bulkrun.job.outputs.marker_decode import MarkerDecode
from bulkrun.job.outputs.tool_calls import MARKERS, split_calls
from bulkrun.launch.preparation.prepare import BUNDLED_ROOT
from bulkrun.request import StructuredOutput, ToolCalls, ToolFormat
from bulkrun.text.constraint import Grammars
from bulkrun.text.grammar import check_grammar
from bulkrun.text.tokenizer import Tokenizer
from bulkrun.text.tool_grammar import calls_grammar
from tests.text.small_tokenizers import byte_level
from tests.text.walking import Choose, walk

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
FUNCTIONS: list[dict[str, Any]] = [
    {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 5}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
        },
    },
    {
        "name": "move-to_9",
        "parameters": {"$defs": {"point": POINT}, "type": "object", "properties": {"to": {"$ref": "#/$defs/point"}}},
    },
    {
        "name": "find",
        "parameters": {
            "$defs": {"Color": {"type": "string", "enum": ["red", "1"]}},
            "type": "object",
            "properties": {
                "zip": {"type": "string", "pattern": "^[0-9]{5}$|[/.]$", "maxLength": 7},
                "near": {"anyOf": [{"type": "string", "minLength": 2, "maxLength": 4}, {"type": "null"}]},
                "color": {"$ref": "#/$defs/Color", "description": "Its color."},
                "word": {"type": "string", "minLength": 3, "maxLength": 6},
            },
            "required": ["zip", "near", "color", "word"],
        },
    },
    {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
]
FORMS: list[ToolFormat] = [*get_args(ToolFormat)]
# special tokens -> the forms that have them
SPECIAL: dict[tuple[str, ...], list[ToolFormat]] = {
    (): FORMS,
    ("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "<|tool_call|>"): [*FORMS[:4], "qwen3_coder"],
    ("[TOOL_CALLS]", "[ARGS]"): ["mistral"],
    **{
        MARKERS[form]: [form]
        for form in (
            "nemotron_json",
            "lfm2",
            "glm45",
            "kimi_k2",
            "minimax_m2",
            "cohere",
            "hunyuan_a13b",
            "gemma4",
            "functiongemma",
            "harmony",
        )
    },
    MARKERS["deepseek_v3"]: ["deepseek_v3", "deepseek_v31"],
    MARKERS["deepseek_v32"]: ["deepseek_v32", "deepseek_v4"],
}
CASES = [(None, form) for form in FORMS] + [(special, form) for special, forms in SPECIAL.items() for form in forms]


def bound(form: ToolFormat, one: bool, functions: list[dict[str, Any]] = FUNCTIONS) -> StructuredOutput:
    tools = [{"type": "function", "function": function} for function in functions]
    offer = offered(tools, "required")
    offer = offer.with_texts() if needs_texts(form) else offer
    calls = ToolCalls(form, texts=json.dumps(offer.texts) if needs_texts(form) else "")
    return bound_calls(calls, {**offer.bound, "one": one})


def answer_of(text: str, form: ToolFormat) -> str:
    """What is read for calls."""
    return split_channels(text, is_ended=True).response or "" if form == "harmony" else text


def with_special(folder: Path, *texts: str) -> Tokenizer:
    """A small tokenizer that has the texts as special tokens."""
    file = byte_level(folder) / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(file))
    backend.add_special_tokens(list(texts))
    backend.save(str(file))
    return Tokenizer.from_dir(folder)


def ending(eos: int, seed: int) -> Choose:
    """Any token, but the end as soon as it may come, and mostly what is printable."""
    generator = random.Random(seed)
    return lambda ids: eos if eos in ids else generator.choice(ids)


@pytest.mark.parametrize(("special", "form"), CASES)
@pytest.mark.parametrize("one", [True, False])
def test_whatever_is_chosen_is_calls_that_fit(
    special: tuple[str, ...] | None, form: ToolFormat, one: bool, tmp_path: Path
) -> None:
    bundled = BUNDLED_ROOT / "tiny"
    tokenizer = Tokenizer.from_dir(bundled) if special is None else with_special(tmp_path, *special)
    structured, eos = bound(form, one), tokenizer.eos_token_id
    assert eos is not None
    check_grammar(structured)
    grammars, decode = Grammars(tokenizer), MarkerDecode(tokenizer.decode_batch, MARKERS[form])
    schemas = {function["name"]: function["parameters"] for function in FUNCTIONS}
    parser, called = BoundCallsParser(structured), set()
    texts = json.dumps(json.loads(structured.value).get("texts", {}))
    for seed in range(12):
        generator = random.Random(seed)
        choose = ending(eos, seed) if one or seed % 3 else (lambda ids, g=generator: g.choice(ids))
        token_ids, is_whole = walk(grammars.constraint(structured), tokenizer, eos, choose, max_tokens=600)
        [text] = decode([token_ids])
        text = answer_of(text, form)
        split = split_calls(text, form, texts)
        if not is_whole:
            continue
        assert split.response is None and len(split.calls) >= 1 and (len(split.calls) == 1 or not one), text
        for call in split.calls:
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])
            called.add(call.name)
        assert parser.parse(text, "stop") == (None, None)
    assert len(called) >= 2, "the choice is the model's"


def test_the_form_is_that_which_models_are_shown(tmp_path: Path) -> None:
    """Token by token: a special token stands for the marker, and no spelling of it."""
    tokenizer = with_special(tmp_path, "[TOOL_CALLS]", "[ARGS]")
    constraint = Grammars(tokenizer).constraint(bound("mistral", True, FUNCTIONS[2:]))
    eos = tokenizer.eos_token_id
    assert eos is not None
    token_ids, is_whole = walk(constraint, tokenizer, eos, ending(eos, 0))
    assert is_whole and token_ids[0] == tokenizer.special_id("[TOOL_CALLS]")
    assert tokenizer.decode_batch([token_ids]) == ["now{}"], "as the markers are special"
    assert MarkerDecode(tokenizer.decode_batch, MARKERS["mistral"])([token_ids]) == ["[TOOL_CALLS]now[ARGS]{}"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("no call", "ends before its calls are complete"),
        ('<tool_call>{"name": "now"}</tool_call> or so', "'or so' stands beside its calls"),
        ('<tool_call>{"name": "then"}</tool_call>', "calls 'then', which it may not"),
        ('<tool_call>{"name": "now", "arguments": {"x": 1}}</tool_call>', "now: the arguments do not fit"),
        ('<tool_call>{"name": "now"}</tool_call>' * 2 + '<tool_call>{"name": "then"}</tool_call>', "calls 'then'"),
        ('<tool_call>{"name": "move-to_9", "arguments": {"to": {"x": "1"}}}</tool_call>', "at $.to.x: '1' is not of"),
    ],
)
def test_what_is_not_what_has_to_be_called_is_an_error(text: str, why: str) -> None:
    _, error = BoundCallsParser(bound("hermes", False)).parse(text, "stop")
    assert error is not None and error.code == "invalid_schema" and why in error.message
    _, cut = BoundCallsParser(bound("hermes", False)).parse(text[:9], "length", "unfinished")
    assert cut is not None and "raise sampling.max_tokens" in cut.message


def test_of_several_calls_the_last_may_be_cut() -> None:
    text = '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n<tool_call>{"na'
    assert BoundCallsParser(bound("hermes", False)).parse(text, "length", "unfinished") == (None, None)


def test_parameters_that_no_grammar_can_be_made_of_are_refused() -> None:
    pattern = {"type": "object", "properties": {"x": {"type": "string", "pattern": "(?=a)"}}}
    with pytest.raises(ValueError, match=r"."):
        check_grammar(bound("hermes", True, [{"name": "f", "parameters": pattern}]))


def test_any_name_is_called_but_those_that_could_not_be_read_back(tmp_path: Path) -> None:
    tokenizer = with_special(tmp_path, "[TOOL_CALLS]", "[ARGS]")
    plain = {"type": "object", "properties": {}, "additionalProperties": False}
    for name, form in (
        ("ge\x7ft", "hermes"),
        ('a"b\\{}\n<é>', "hermes"),
        ("a b", "granite"),
        ('a"b\\{}\n<é>', "cohere"),
        ("ge\x7ft", "mistral"),
    ):
        structured = bound(form, True, [{"name": name, "parameters": plain}])  # type: ignore[arg-type]
        eos = tokenizer.eos_token_id
        assert eos is not None
        token_ids, is_whole = walk(Grammars(tokenizer).constraint(structured), tokenizer, eos, ending(eos, 0))
        [text] = MarkerDecode(tokenizer.decode_batch, MARKERS[form])([token_ids])  # type: ignore[index]
        assert is_whole and [call.name for call in split_calls(text, form).calls] == [name]  # type: ignore[arg-type]
    for form in ("deepseek_v3", "deepseek_v31", "kimi_k2"):
        with pytest.raises(ValueError, match="white space or < in its name"):
            calls_grammar(bound(form, True, [{"name": "a<b", "parameters": plain}]).value)  # type: ignore[arg-type]
    for name in ("a b", "a[b", "{"):
        with pytest.raises(ValueError, match="white space or brackets in its name"):
            calls_grammar(bound("mistral", True, [{"name": name, "parameters": plain}]).value, tokenizer.special_id)


@pytest.mark.parametrize("special", [(), MARKERS["glm45"]])
def test_calls_of_glm_may_do_without_line_breaks(special: tuple[str, ...], tmp_path: Path) -> None:
    """As its templates since 4.7 write them."""
    tokenizer = with_special(tmp_path, *special)
    pairs = "<arg_key>city</arg_key><arg_value>Rome</arg_value><arg_key>unit</arg_key><arg_value>C</arg_value>"
    call = f"<tool_call>weather{pairs}</tool_call>"
    for between in ("", "\n"):
        [token_ids] = tokenizer.encode_batch([between.join([call, call.replace("><", ">\n<"), call])], False)
        constraint = Grammars(tokenizer).constraint(bound("glm45", False))
        assert all(constraint.accept(token) is None for token in token_ids) and constraint.progress() == "whole"


@pytest.mark.parametrize("special", [(), MARKERS["deepseek_v32"]])
@pytest.mark.parametrize(
    ("string", "written", "fits"),
    [
        ("true", "ab</", True),
        ("true", "null", True),  # a text of four letters
        ("false", "null", True),
        ("false", '"ab"', False),
        ("true", "abcdef", False),
    ],
)
def test_deepseek_says_what_is_a_text(
    special: tuple[str, ...], string: str, written: str, fits: bool, tmp_path: Path
) -> None:
    tokenizer = with_special(tmp_path, *special)
    near = {"type": ["string", "null"], "maxLength": 4}
    structured = bound(
        "deepseek_v32", True, [{"name": "f", "parameters": {"type": "object", "properties": {"x": near}}}]
    )
    parameter = f'<｜DSML｜parameter name="x" string="{string}">{written}</｜DSML｜parameter>'
    invoke = f'<｜DSML｜invoke name="f">\n{parameter}\n</｜DSML｜invoke>'
    text = f"<｜DSML｜function_calls>\n{invoke}\n</｜DSML｜function_calls>"
    [token_ids] = tokenizer.encode_batch([text], False)
    constraint = Grammars(tokenizer).constraint(structured)
    accepted = all(constraint.accept(token) is None for token in token_ids)
    assert (accepted and constraint.progress() == "closed") is fits
    if fits:
        [call] = split_calls(text, "deepseek_v32").calls
        assert json.loads(call.arguments) == {"x": written if string == "true" else None}


LFM_CALLS = [
    ('f(on=True, note=None, at={"x": 1})', True),
    ('f(on=true, note="a", kind=None)', True),
    ("f(on=False, kind=True, tags=[null, true])", True),
    ("f(on=True)", True),
    ("f(on=None)", False),
    ("f(note=None)", False),  # `on` has to be there
    ("f(on=True, at=None)", False),
    ("f(on=True, kind=False)", False),
    ("f(on=True on=True)", False),
    ("f(note=None, on=True)", False),  # in their order
    ("f(on=True, )", False),
]


@pytest.mark.parametrize(("call", "fits"), LFM_CALLS)
def test_lfm2_may_write_the_words_of_python_where_their_values_fit(call: str, fits: bool, tmp_path: Path) -> None:
    properties = {
        "on": {"type": "boolean"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "kind": {"enum": ["a", True, None]},
        "at": POINT,
        "tags": {"type": ["array", "null"], "items": {"type": ["boolean", "null"]}},
    }
    functions = [{"name": "f", "parameters": {"type": "object", "properties": properties, "required": ["on"]}}]
    tokenizer = with_special(tmp_path, *MARKERS["lfm2"])
    constraint = Grammars(tokenizer).constraint(bound("lfm2", False, functions))
    text = f"<|tool_call_start|>[{call}, {call}]<|tool_call_end|>"
    [token_ids] = tokenizer.encode_batch([text], False)
    accepted = all(constraint.accept(token) is None for token in token_ids)
    assert (accepted and constraint.progress() == "closed") is fits
    if fits:
        assert BoundCallsParser(bound("lfm2", False, functions)).parse(text, "stop") == (None, None)


def test_what_cannot_be_written_as_in_python_is_refused() -> None:
    for name, key, said in (("a b", "x", "the function 'a b'"), ("f", "x=", "the parameter of 'f' 'x='")):
        with pytest.raises(ValueError, match=said):
            check_grammar(bound("lfm2", True, [{"name": name, "parameters": {"properties": {key: {}}}}]))


TAGGED = ["qwen3_coder", "glm45", "minimax_m2", "deepseek_v32"]


@pytest.mark.parametrize("form", TAGGED)
def test_a_parameter_has_the_definitions_that_it_refers_to(form: ToolFormat) -> None:
    """Others may join objects, and where objects are joined none is closed (`closed_schema`)."""
    definitions = {"Both": {"allOf": [{"type": "object"}, {"type": "object"}]}, "One": {"type": "integer"}}
    properties = {"a": POINT, "b": {"type": "array", "items": {"$ref": "#/$defs/One"}}}
    parameters = {"type": "object", "properties": properties, "$defs": definitions}
    rules = calls_grammar(bound(form, True, [{"name": "f", "parameters": parameters}]).value).split("\n")
    [a, b] = [json.loads(rule.partition("%json ")[2]) for rule in rules if "%json" in rule]
    assert a["additionalProperties"] is False and "$defs" not in a and b["$defs"] == definitions


@pytest.mark.parametrize("form", [*TAGGED, "lfm2", "gemma4"])
def test_a_parameter_may_refer_to_any_place(form: ToolFormat) -> None:
    """As schemas made of TypeScript do, and trees."""
    tokenizer = Tokenizer.from_dir(BUNDLED_ROOT / "tiny")
    name = {"type": "string", "enum": ["a", "b"]}
    whole = {"$ref": "#/properties/point", "description": "the same"}
    properties = {
        "point": {**POINT, "additionalProperties": False},
        "others": {"type": "array", "items": {"$ref": "#/properties/point"}, "minItems": 1, "maxItems": 2},
        "below": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1},
        "kind": {"anyOf": [{"$ref": "#/$defs/Name"}, {"$ref": "#/$defs/Names/items"}]},
        "last": whole,
    }
    definitions = {"Name": name, "Names": {"type": "array", "items": name}, "Tree": {"$ref": "#/properties/below"}}
    required = ["others", "below", "kind", "last"]
    parameters = {"type": "object", "properties": properties, "required": required, "$defs": definitions}
    structured, eos = bound(form, True, [{"name": "f", "parameters": parameters}]), tokenizer.eos_token_id
    assert eos is not None
    texts = json.dumps(json.loads(structured.value).get("texts", {}))
    grammars, read = Grammars(tokenizer), 0
    for seed in range(8):
        token_ids, is_whole = walk(grammars.constraint(structured), tokenizer, eos, ending(eos, seed), 600)
        [text] = tokenizer.decode_batch([token_ids])
        if is_whole:
            [call] = split_calls(text, form, texts).calls
            jsonschema.validate(json.loads(call.arguments), parameters)
            read += 1
    assert read


@pytest.mark.parametrize("form", TAGGED)
def test_what_cannot_stand_between_tags_is_refused(form: ToolFormat) -> None:
    def said(name: str, parameters: dict[str, Any]) -> str:
        with pytest.raises(ValueError, match=r".") as error:
            check_grammar(bound(form, True, [{"name": name, "parameters": parameters}]))
        return str(error.value)

    assert "the function 'a b' cannot be called" in said("a b", {"type": "object"})
    assert "the parameter '<x>' of 'f' cannot be written" in said("f", {"properties": {"<x>": {}}})
    if form not in ("qwen3_coder", "glm45"):
        assert "cannot be written in this format: tags or quotes" in said("f", {"properties": {'"x"': {}}})
    assert "have anyOf for properties" in said("f", {"anyOf": [{"properties": {"x": {}}}]})
