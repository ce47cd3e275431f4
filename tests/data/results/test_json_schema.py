"""Arrow types of schemas, judged by Arrow, Parquet, DuckDB and `jsonschema`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb
import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulkrun.data.results.json_schema import arrow_type, to_arrow_value

TEXT, WHOLE, NUMBER, TRUTH = pa.string(), pa.int64(), pa.float64(), pa.bool_()


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string"}, TEXT),
        ({"type": "integer"}, WHOLE),
        ({"type": "number"}, NUMBER),
        ({"type": "boolean"}, TRUTH),
        ({"enum": ["a", "b", None]}, TEXT),
        ({"enum": [1, 2]}, WHOLE),
        ({"enum": [1, 2.5]}, NUMBER),
        ({"enum": [1, "a"]}, TEXT),
        ({"const": True}, TRUTH),
        ({"type": ["integer", "null"]}, WHOLE),
        ({"type": ["integer", "number"]}, NUMBER),
        ({"type": ["integer", "string"]}, TEXT),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, WHOLE),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, TEXT),
        ({"type": "null"}, TEXT),
        ({}, TEXT),
        (True, TEXT),
        ({"type": "array", "items": {"type": "integer"}}, pa.list_(WHOLE)),
        ({"type": "array"}, TEXT),
        ({"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "string"}}, TEXT),
        ({"type": "object"}, TEXT),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, TEXT),
        (
            {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}},
            pa.struct([("b", TEXT), ("a", WHOLE)]),
        ),
        ({"type": "object", "properties": {"b": {"type": "string"}}, "additionalProperties": {"type": "string"}}, TEXT),
        ({"type": "object", "properties": {"a": {"type": "boolean"}, "A": {"type": "integer"}}}, TEXT),
        ({"type": "object", "properties": {"": {"type": "integer"}}}, TEXT),
        ({"properties": {"a": True}, "patternProperties": {"^x": True}}, TEXT),
        ({"properties": {"a": True}, "allOf": [{"properties": {"b": True}}]}, TEXT),
        ({"properties": {"a": True}, "anyOf": [{"properties": {"b": True}}]}, TEXT),
        ({"properties": {"a": True}, "$ref": "#/$defs/x", "$defs": {"x": {"properties": {"b": True}}}}, TEXT),
        (
            {"properties": {"x": {"properties": {"É": True, "é": True}}}},
            pa.struct([("x", pa.struct([("É", TEXT), ("é", TEXT)]))]),
        ),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "boolean"}}}, TRUTH),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "number"}}}, NUMBER),
        ({"$ref": "#/$defs/a~01", "$defs": {"a~1": {"type": "number"}}}, NUMBER),
        ({"allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": {"type": "boolean"}}}, TRUTH),
        (
            {
                "$ref": "#/$defs/node",
                "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
            },
            pa.struct([("next", TEXT)]),
        ),
    ],
)
def test_a_schema_has_its_arrow_type(schema: Any, expected: pa.DataType) -> None:
    assert arrow_type(schema) == expected


PERSON = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "age": {"type": ["integer", "null"]},
        "scores": {"type": "array", "items": {"type": "number"}},
        "home": {"type": "object", "properties": {"city": {"type": "string"}, "extra": {}}},
    },
    "required": ["title"],
    "additionalProperties": False,
}


def test_duckdb_reads_the_members_of_a_parsed_column(tmp_path: Path) -> None:
    kind = arrow_type(PERSON)
    values = [
        {"title": "x", "age": 3, "scores": [1, 2.5], "home": {"city": "Bern", "extra": {"a": [1]}}},
        {"title": "y", "age": None},
        None,
    ]
    table = pa.table({"parsed": pa.array([to_arrow_value(value, kind) for value in values], kind)})
    pq.write_table(table, tmp_path / "part.parquet")
    results = duckdb.read_parquet(str(tmp_path / "part.parquet"))  # noqa: F841
    rows = duckdb.sql(
        "SELECT parsed.title, parsed.age, parsed.scores[2], parsed.home.city, parsed.home.extra FROM results"
    )
    assert rows.fetchall() == [("x", 3, 2.5, "Bern", '{"a":[1]}'), ("y", None, None, None, None), (None,) * 5]


def test_null_typed_column_late_fields_dropped() -> None:
    """10,000 rows without a value, then rows with: the schema was declared before, so nothing is null-typed or lost."""
    kind = arrow_type(PERSON)
    early = pa.array([to_arrow_value(None, kind)] * 10_000, kind)
    late = pa.array([to_arrow_value({"title": "x", "scores": [1]}, kind)], kind)
    assert early.type == late.type == kind
    assert pa.chunked_array([early, late]).to_pylist()[-1]["scores"] == [1.0]


leaves = st.sampled_from([{"type": kind} for kind in ("string", "integer", "number", "boolean", "null")] + [{}])
schemas = st.recursive(
    leaves,
    lambda inner: (
        st.builds(lambda items: {"type": "array", "items": items}, inner)
        | st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3))
        | st.builds(
            lambda members: {"type": "object", "properties": members, "additionalProperties": False},
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        )
    ),
    max_leaves=8,
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300)
@given(schema=schemas, value=json_values)
def test_a_value_that_fits_its_schema_fits_its_column(schema: dict[str, Any], value: Any) -> None:
    if not jsonschema.Draft202012Validator(schema).is_valid(value):
        return
    kind = arrow_type(schema)
    try:
        converted = to_arrow_value(value, kind)
    except ValueError as refused:
        assert "does not fit into a 64-bit" in str(refused)
        return
    pa.array([json.loads(json.dumps(converted))], kind)  # as the journal keeps it


@pytest.mark.parametrize(
    ("value", "kind", "said"),
    [
        (2**63, WHOLE, "64-bit integer"),
        (-(2**63) - 1, WHOLE, "64-bit integer"),
        (10**400, NUMBER, "64-bit number"),
        (float("inf"), NUMBER, "64-bit number"),
        (float("-inf"), NUMBER, "64-bit number"),
        ({"a": [float("inf")]}, TEXT, "1e999, does not fit"),
        ("text", pa.struct([("a", TEXT)]), "not an object"),
        ({"a": 1}, pa.list_(TEXT), "not an array"),
    ],
)
def test_a_value_that_the_column_cannot_hold_is_refused(value: Any, kind: pa.DataType, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        to_arrow_value(value, kind)


def test_whole_numbers_may_be_written_as_floats_and_surrogates_do_not_reach_parquet() -> None:
    assert to_arrow_value(3.0, WHOLE) == 3
    assert to_arrow_value(json.loads('"a\\ud800"'), TEXT) == "a?"
    assert to_arrow_value({"é": [1, "x"]}, TEXT) == '{"é":[1,"x"]}'
