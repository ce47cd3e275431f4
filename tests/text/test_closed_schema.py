"""Closed schemas allow less, never more; `jsonschema` is the judge."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulkrun.text.closed_schema import closed

NAMES = st.sampled_from("abc")
scalars = st.sampled_from([{"type": "string"}, {"type": "integer"}, {"type": "null"}, True, {}])
schemas = st.recursive(
    scalars,
    lambda inner: (
        st.builds(lambda items: {"type": "array", "items": items}, inner)
        | st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=2))
        | st.builds(lambda parts: {"allOf": parts}, st.lists(inner, min_size=1, max_size=2))
        | st.builds(lambda excluded: {"not": excluded}, inner)
        | st.builds(
            lambda members, required: {"type": "object", "properties": members, "required": required},
            st.dictionaries(NAMES, inner, max_size=2),
            st.lists(NAMES, max_size=2, unique=True),
        )
    ),
    max_leaves=6,
)
values = st.recursive(
    st.none() | st.integers() | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300)
@given(schema=schemas, value=values)
def test_what_fits_the_closed_schema_fits_the_schema(schema: Any, value: Any) -> None:
    before = json.dumps(schema)
    if jsonschema.Draft202012Validator(closed(schema)).is_valid(value):
        assert jsonschema.Draft202012Validator(schema).is_valid(value)
    assert json.dumps(schema) == before, "the schema itself is left alone"


def test_objects_are_closed_wherever_they_stand_and_keep_their_order() -> None:
    inner = {"type": "object", "properties": {"b": {}, "a": {}}}
    schema = {
        "type": "object",
        "properties": {"list": {"items": inner}, "ref": {"$ref": "#/$defs/x"}},
        "$defs": {"x": inner},
    }
    made = closed(schema)
    assert made["additionalProperties"] is False
    assert made["properties"]["list"]["items"] == {**inner, "additionalProperties": False}
    assert made["$defs"]["x"] == {**inner, "additionalProperties": False}
    assert list(made["$defs"]["x"]["properties"]) == ["b", "a"]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "properties": {"a": {}}, "additionalProperties": True},
        {"type": "object", "properties": {"a": {}}, "patternProperties": {"^x": {}}},
        {"type": "object", "properties": {"a": {}}, "required": ["b"]},
        {"allOf": [{"type": "object", "properties": {"a": {}}}, {"type": "object", "properties": {"b": {}}}]},
        {"properties": {"a": {}}, "anyOf": [{"required": ["b"]}]},
        {"not": {"type": "object", "properties": {"a": {}}}},
        {"properties": {"a": {}}, "if": {"required": ["a"]}, "then": {"required": ["b"]}},
        {"enum": [{"properties": {"a": 1}}]},
        {"properties": 1},
        "text",
    ],
)
def test_what_is_open_on_purpose_or_joined_stays_as_it_is(schema: Any) -> None:
    assert closed(schema) == schema
