"""What counts as a usable JSON schema."""

from __future__ import annotations

import time
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema_specifications import REGISTRY

from bulkrun.data.results.schema_check import _metaschema_in_one, check_schema


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object", "properties": {"$ref": {"type": "string"}}},
        {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}},
        {"type": "string", "pattern": "^\\p{L}+$"},  # Python's `re` cannot read it; llguidance can
    ],
)
def test_usable_schemas_pass(schema: dict[str, Any]) -> None:
    check_schema(schema)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ([], "not an object"),
        ("text", "not an object"),
        ({"type": "strin"}, r"\$\.type"),
        ({"properties": {"a": {"minimum": "x"}}}, r"\$\.properties\.a\.minimum"),
        ({"$ref": "https://127.0.0.1:9/schema.json"}, "which is not in it"),
        ({"$ref": "#/$defs/missing"}, "which is not in it"),
        ({"$ref": "#/anyOf/1", "anyOf": [{"type": "string"}]}, "which is not in it"),
    ],
)
def test_a_broken_schema_is_refused_with_its_place(schema: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_schema(schema)


DRAFT = "https://json-schema.org/draft/2020-12/"
KEYWORDS = sorted({key for uri in REGISTRY if uri.startswith(DRAFT) for key in REGISTRY.contents(uri)["properties"]})
PLAIN = st.none() | st.booleans() | st.integers(-2, 3) | st.sampled_from([0.5, "a", "string", "#/a", "#", "^[", ""])
# What keywords take, each other's as well: now and then a whole schema, mostly one that is wrong somewhere.
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=2),
        st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2),
    ),
    max_leaves=6,
)


@given(keyword=st.sampled_from(KEYWORDS), value=VALUES, inside=st.booleans())
@settings(max_examples=1500)
def test_the_schema_of_schemas_in_one_document_says_what_the_published_one_says(
    keyword: str, value: Any, inside: bool
) -> None:
    published = jsonschema.Draft202012Validator(jsonschema.Draft202012Validator.META_SCHEMA)
    schema = {"properties": {"a": {keyword: value}}} if inside else {keyword: value}
    assert _metaschema_in_one().is_valid(schema) == published.is_valid(schema)


def test_a_schema_that_says_one_thing_a_million_times_is_refused() -> None:
    definitions: dict[str, Any] = {"a0": {"type": "string"}}
    for i in range(1, 60):
        definitions[f"a{i}"] = {"allOf": [{"$ref": f"#/$defs/a{i - 1}"}, {"$ref": f"#/$defs/a{i - 1}"}]}
    begin = time.process_time()
    with pytest.raises(ValueError, match="parts"):
        check_schema({"$ref": "#/$defs/a59", "$defs": definitions})
    assert time.process_time() - begin < 5


def test_a_schema_nested_without_end_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(3000):
        deep = {"not": deep}
    with pytest.raises(ValueError, match="too deeply"):
        check_schema(deep)
