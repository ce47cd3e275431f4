"""Formats of strings: those that the grammar knows bind, others ask nothing, wherever in a schema they stand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from bulkrun.request import StructuredOutput
from bulkrun.text.grammar import check_grammar
from bulkrun.text.schema_formats import KNOWN_FORMATS, without_unknown_formats

PHONE = {"type": "string", "format": "phone"}


@pytest.mark.parametrize(
    "schema",
    [
        PHONE,
        {"properties": {"format": PHONE, "const": PHONE}},
        {"type": "array", "items": {"anyOf": [PHONE, {"type": "null"}]}},
        {"$ref": "#/$defs/path", "$defs": {"path": PHONE}},
        {"type": "object", "additionalProperties": PHONE},
    ],
)
def test_a_schema_with_formats_that_nobody_knows_can_be_used(schema: dict[str, Any]) -> None:
    check_grammar(StructuredOutput("json", json.dumps(schema)))
    assert "phone" not in json.dumps(without_unknown_formats(schema))


def test_a_tools_schema_is_no_other() -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"to": PHONE}}}
    check_grammar(
        StructuredOutput("tool_calls", json.dumps({"format": "hermes", "functions": [function], "one": True}))
    )


def test_values_that_look_like_formats_stay() -> None:
    schema = {"const": {"format": "phone"}, "enum": [{"format": "phone"}], "format": {"no": "format"}}
    assert without_unknown_formats(schema) == schema
    assert without_unknown_formats(True) is True


def test_the_known_formats_are_those_of_the_grammar() -> None:
    names = [*KNOWN_FORMATS, "uri-reference", "iri", "regex", "json-pointer", "idn-email", "password", "path"]
    grammars = {name: LLMatcher.grammar_from_json_schema(json.dumps({"format": name})) for name in names}
    assert {name for name in names if not LLMatcher.validate_grammar(grammars[name])} == KNOWN_FORMATS
