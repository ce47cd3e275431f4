"""Finished texts against what was asked of them."""

from __future__ import annotations

import json
import math
import socket
from typing import Any

import jsonschema
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulkrun.job.outputs.parsing import OutputParser
from bulkrun.request import Progress, StructuredOutput

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "pattern": "^(a+)+$"},
        "n": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["title"],
    "additionalProperties": False,
}


def parser(schema: Any = SCHEMA, column: pa.DataType | None = None) -> OutputParser:
    return OutputParser(StructuredOutput("json", json.dumps(schema)), column)


def test_a_text_that_fits_becomes_a_value() -> None:
    assert parser().parse('{"title": "aa", "n": 3}', "stop") == ({"title": "aa", "n": 3, "tags": None}, None)


@pytest.mark.parametrize("length", range(len('{"title": "aa", "tags": ["x"]}')))
def test_truncated_json_patched_by_adding_a_brace(length: int) -> None:
    """An output that max_tokens cut is flagged at whatever character that was; nothing is added to make it parse."""
    value, error = parser().parse('{"title": "aa", "tags": ["x"]}'[:length], "length")
    assert value is None
    assert error is not None
    assert error.code == "invalid_schema"
    assert "raise sampling.max_tokens" in error.message


def test_an_output_that_is_whole_at_its_last_token_is_an_answer() -> None:
    value, error = parser().parse('{"title": "aa"}', "length")
    assert error is None
    assert value["title"] == "aa"


def test_a_number_that_was_cut_may_have_gone_on() -> None:
    assert parser({"type": "integer"}).parse("12", "stop") == (12, None)
    for finish_reason in ("length", "stop"):
        value, error = parser({"type": "integer"}).parse("12", finish_reason, "whole")
        assert value is None
        assert error is not None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"title": 1}', "$.title"),
        ('{"titel": "aa"}', "'title' is a required property"),
        ("", "not valid JSON"),
        ('{"title": NaN}', "NaN is not JSON"),
        ('{"title": "aa", "n": 99999999999999999999}', "64-bit integer"),
        ("[" * 200_000, "nested too deeply"),
        ('{"title": "aa", "n": ' + "9" * 5000 + "}", "not valid JSON"),
    ],
)
def test_a_text_that_does_not_fit_is_flagged_with_the_place(text: str, said: str) -> None:
    value, error = parser().parse(text, "stop")
    assert value is None
    assert error is not None
    assert error.code == "invalid_schema"
    assert said in error.message
    assert len(error.message) < 300


def test_patterns_are_left_to_the_grammar() -> None:
    """`(a+)+$` would take Python's `re` longer than the universe has; `\\p{L}` it cannot read."""
    assert parser().parse(json.dumps({"title": "a" * 60 + "!"}), "stop")[1] is None
    letters = {"type": "object", "patternProperties": {"^\\p{L}$": {"type": "string"}}, "additionalProperties": False}
    assert parser(letters).parse('{"é": "x"}', "stop") == ('{"é":"x"}', None)


HANGS = "^(a+)+$"
LONG = "a" * 40 + "b"
DIALECTS = ["https://json-schema.org/draft/2020-12/schema", "http://json-schema.org/draft-07/schema#"]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("pattern", [HANGS, "^\\p{L}+$"])
@pytest.mark.parametrize(
    "place", ["nested", "root again", "by anchor", "in a resource", "unevaluated", "name", "pattern of names"]
)
def test_patterns_are_left_to_the_grammar_whatever_dialect_a_part_of_the_schema_names(
    dialect: str, pattern: str, place: str
) -> None:
    """jsonschema picks the validator anew wherever it finds `$schema`: the stock one would run Python's `re`."""
    text = {"$schema": dialect, "type": "string", "pattern": pattern}
    names = {"$schema": dialect, "patternProperties": {pattern: {"type": "integer"}}}
    inside: dict[str, Any] = {
        "nested": text,
        "root again": {"$ref": "#"},
        "by anchor": {"$dynamicRef": "#here"},
        "in a resource": {"$id": "https://example.org/x", "$ref": "#/$defs/x", "$defs": {"x": text}},
        "unevaluated": {**names, "unevaluatedProperties": False},
        "name": {"$schema": dialect, "propertyNames": text},
        "pattern of names": {**names, "additionalProperties": False},
    }[place]
    root: dict[str, Any] = {"properties": {"x": inside}, "$defs": {"y": {"$dynamicAnchor": "here", "allOf": [text]}}}
    if place == "root again":
        root = {**text, "type": ["object", "string"], "properties": {"x": inside}}
    value = {LONG: 1} if place in ("unevaluated", "name", "pattern of names") else LONG
    assert parser(root, pa.string()).parse(json.dumps({"x": value}), "stop")[1] is None


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_part_of_the_schema_that_names_a_dialect_is_checked(dialect: str) -> None:
    tree = {"$schema": dialect, "type": "object", "properties": {"n": {"type": "integer"}, "child": {"$ref": "#"}}}
    assert parser(tree, pa.string()).parse('{"child": {"n": 1}}', "stop")[1] is None
    _, error = parser(tree, pa.string()).parse('{"child": {"n": "x"}}', "stop")
    assert error is not None
    assert "$.child.n" in error.message


def test_references_to_other_documents_are_never_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        pytest.fail("a schema made a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    remote = {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/schema.json"}}}
    value, error = parser(remote).parse('{"a": 1}', "stop")
    assert value is None
    assert error is not None
    assert "which is not in it" in error.message


def test_rows_with_schemas_of_their_own_give_json_text() -> None:
    assert parser(column=pa.string()).parse('{"title": "aa",  "n": 3}', "stop") == ('{"title":"aa","n":3}', None)


@pytest.mark.parametrize(
    ("text", "finish_reason", "fits"),
    [("yes", "stop", True), ("yes", "length", True), ("ye", "length", False), ("maybe", "stop", False)],
)
def test_an_output_is_one_of_the_choices_or_flagged(text: str, finish_reason: str, fits: bool) -> None:
    value, error = OutputParser(StructuredOutput("choice", '["yes", "no"]')).parse(text, finish_reason)
    assert value is None
    assert (error is None) == fits


@pytest.mark.parametrize("kind", ["regex", "grammar"])
def test_a_cut_output_of_a_regex_or_grammar_is_flagged(kind: Any) -> None:
    parsed = OutputParser(StructuredOutput(kind, "[0-9]{4}"))
    assert parsed.parse("1234", "stop") == (None, None)
    for finish_reason, fix in (("length", "raise sampling.max_tokens"), ("stop", "sampling.stop or sampling.stop_tok")):
        value, error = parsed.parse("12", finish_reason, "unfinished")
        assert value is None
        assert error is not None
        assert fix in error.message


@pytest.mark.parametrize("kind", ["regex", "grammar"])
@pytest.mark.parametrize(("progress", "fits"), [("closed", True), ("whole", True), ("unfinished", False)])
@pytest.mark.parametrize("finish_reason", ["length", "stop"])
def test_a_regex_or_grammar_that_fits_at_the_limit_or_the_stop_is_an_answer(
    kind: Any, progress: Progress, fits: bool, finish_reason: str
) -> None:
    _, error = OutputParser(StructuredOutput(kind, "[0-9]{2,4}")).parse("12", finish_reason, progress)
    assert (error is None) == fits


def test_a_number_too_large_to_divide_is_flagged() -> None:
    _, error = parser({"type": "integer", "multipleOf": 0.5}).parse("9" * 400, "stop")
    assert error is not None
    assert error.code == "invalid_schema"


@pytest.mark.parametrize(
    ("written", "divisor", "fits"),
    [
        ("19.99", 0.01, True),
        ("0.7", 0.1, True),
        ("-7e-1", 0.1, True),
        ("0.75", 0.1, False),
        ("7.5", 3, False),
        ("1e300", 0.1, True),
        ("1e999", 0.1, False),
        ("9" * 400, 7, False),
    ],
)
def test_a_multiple_is_one_as_it_is_written(written: str, divisor: float, fits: bool) -> None:
    value, error = parser({"type": "number", "multipleOf": divisor}).parse(written, "stop")
    assert (error is None) == fits, error
    assert not fits or value == float(written)


def test_a_number_that_nothing_can_follow_is_an_answer() -> None:
    rating = parser({"type": "integer", "minimum": 1, "maximum": 5})
    assert rating.parse("3", "length", "closed") == (3, None)
    assert rating.parse("3", "length", "whole")[1] is not None


@settings(max_examples=200)
@given(
    value=st.fixed_dictionaries(
        {}, optional={"title": st.text(max_size=3) | st.integers(), "n": st.integers() | st.floats(), "x": st.none()}
    )
)
def test_flagged_if_and_only_if_jsonschema_refuses(value: dict[str, Any]) -> None:
    schema = {**SCHEMA, "properties": {**SCHEMA["properties"], "title": {"type": "string"}}}  # type: ignore[dict-item]
    text = json.dumps(value)
    fits = math.isfinite(value.get("n", 0))
    fits = fits and jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
    fits = fits and -(2**63) <= value.get("n", 0) < 2**63
    assert (parser(schema).parse(text, "stop")[1] is None) == fits
