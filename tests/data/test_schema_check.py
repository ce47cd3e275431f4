"""What counts as a usable JSON schema."""

from __future__ import annotations

import time
from typing import Any

import pytest

from bulkrun.data.schema_check import check_schema


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
    ],
)
def test_a_broken_schema_is_refused_with_its_place(schema: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_schema(schema)


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
