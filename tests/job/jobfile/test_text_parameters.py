"""Which parameters of tools are texts, however their schemas say so."""

from __future__ import annotations

from typing import Any

import pytest

from bulkrun.job.jobfile.text_parameters import in_place, text_parameters

DEFS: dict[str, Any] = {
    "Color": {"enum": ["red", "1"], "title": "Color", "type": "string"},
    "Alias": {"$ref": "#/$defs/Color"},
    "Loop": {"$ref": "#/$defs/Loop"},
    "Tree": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"$ref": "#/$defs/Tree"}}]},
    "Circle": {"anyOf": [{"$ref": "#/$defs/Circle"}, {"type": "null"}]},
}


def kinds(schema: Any) -> list[str] | None:
    parameters = {"properties": {"x": schema, "beside": {"type": "string"}}, "$defs": DEFS}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    return text_parameters(tools)["f"].get("x")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": ["string"], "maxLength": 5},
        {"enum": ["x", "y"]},
        {"const": "x"},
        {"type": "string", "enum": ["x", 1]},
        {"$ref": "#/$defs/Color"},
        {"$ref": "#/$defs/Alias", "description": "its color", "default": "red"},
        {"allOf": [{"$ref": "#/$defs/Color"}], "description": "as pydantic wrote it"},
        {"$ref": "#/properties/beside"},
    ],
)
def test_texts_and_nothing_else(schema: Any) -> None:
    assert kinds(schema) == []


@pytest.mark.parametrize(
    "schema",
    [
        {"type": ["string", "null"]},
        {"enum": ["x", None]},
        {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}], "default": None},
        {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/Color"}]},
    ],
)
def test_texts_or_null(schema: Any) -> None:
    assert kinds(schema) == ["null"]


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}], "maxLength": 5}, ["null"]),
        ({"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}], "maxLength": 5}, ["null", "string"]),
        ({"anyOf": [{"anyOf": [{"type": "string"}]}, {"type": "null"}]}, ["null", "string"]),
        ({"oneOf": [{"$ref": "#/$defs/Color"}, {"type": "number"}]}, ["integer", "number", "string"]),
        ({"enum": ["x", 1, None]}, ["integer", "null", "string"]),
        ({"anyOf": [{"type": "string", "minLength": 1}, {"const": ""}]}, ["string"]),
        ({"allOf": [{"type": ["string", "null"]}, {"type": ["string", "array"]}]}, ["string"]),
        ({"$ref": "#/$defs/Tree"}, ["array", "string"]),
        ({"anyOf": [True, {"type": "string"}], "type": ["string", "boolean"]}, ["boolean", "string"]),
    ],
)
def test_texts_or_something_else(schema: Any, wanted: list[str]) -> None:
    assert kinds(schema) == wanted


@pytest.mark.parametrize(
    "schema",
    [
        *({}, True, False, {"description": "anything"}, {"type": "integer"}, {"enum": [1, None]}),
        *({"$ref": "#/$defs/Loop"}, {"$ref": "#/$defs/Gone"}, {"$ref": "http://elsewhere"}, {"$ref": 5}, {"type": []}),
        *({"anyOf": []}, {"anyOf": 5, "allOf": 5, "enum": 5, "type": 5}, {"allOf": [5]}, {"const": 1.5}),
        {"type": "integer", "enum": ["1"]},
        {"$ref": "#/$defs/Circle"},
    ],
)  # fmt: skip
def test_what_is_no_text_or_may_be_anything(schema: Any) -> None:
    assert kinds(schema) is None


def test_tools_without_parameters_have_no_texts() -> None:
    functions = [{"name": "f"}, {"name": "g", "parameters": {"properties": 5}}, {"name": "h", "parameters": None}]
    tools = [{"type": "function", "function": function} for function in functions]
    assert text_parameters(tools) == {"f": {}, "g": {}, "h": {}}


def test_what_is_referred_to_stands_in_place() -> None:
    plain = {"properties": {"x": {"type": "string"}}}
    assert in_place(plain) is plain
    color = {"$ref": "#/$defs/Color", "title": "Its color"}
    narrow = {"$ref": "#/$defs/Color", "enum": ["red"]}  # a value has to fit both
    placed = in_place({"properties": {"x": color, "y": narrow, "z": [1]}, "$defs": DEFS, "required": ["x"]})
    wanted = {"x": {**DEFS["Color"], "title": "Its color"}, "y": narrow, "z": [1]}
    assert placed == {"properties": wanted, "$defs": DEFS, "required": ["x"]}


def test_a_text_or_null_has_one_schema() -> None:
    def placed(text: dict[str, Any], **beside: Any) -> Any:
        parameters = {"properties": {"x": {"anyOf": [text, {"type": "null"}], **beside}}, "$defs": DEFS}
        return in_place(parameters)["properties"]["x"]

    kind = {"type": ["string", "null"]}
    assert placed({"type": "string", "maxLength": 5}, title="X") == {**kind, "maxLength": 5, "title": "X"}
    assert placed({"$ref": "#/$defs/Color"}) == {**kind, "enum": ["red", "1", None], "title": "Color"}
    assert placed({"const": "a"}, default=None) == {**kind, "enum": ["a", None], "default": None}
