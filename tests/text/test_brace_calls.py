"""Grammars of the Gemmas' calls: what fits a schema may be written, and what does not may not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bulkrun.job.outputs.bound_calls import BoundCallsParser
from bulkrun.job.outputs.tool_calls import MARKERS, split_calls
from bulkrun.text.constraint import Grammars
from bulkrun.text.grammar import check_grammar
from tests.text.test_tool_grammar import bound, with_special

TREE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "below": {"type": "array", "items": {"$ref": "#/$defs/Tree"}}},
    "required": ["name"],
}
# as schemas say that one of several has to be there, or what goes with each kind
EITHER = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
}
OF_KIND = {
    "type": "object",
    "properties": {"kind": {"type": "string"}},
    "required": ["kind"],
    "oneOf": [{"properties": {"n": {"type": "integer"}}, "required": ["n"]}, {"maxProperties": 1}],
}
# schema of x, what is written of it (@ for the mark of texts), whether it fits
VALUES: list[tuple[Any, str, bool]] = [
    ({"type": "string"}, "@a, {b}: [c]@", True),
    ({"type": "string"}, "@@", True),
    ({"type": "string"}, "a", False),
    ({"type": "string"}, '"a"', False),
    ({"type": "string", "maxLength": 3}, "@abc@", True),
    ({"type": "string", "maxLength": 3}, "@abcd@", False),
    ({"type": "string", "pattern": "^[0-9]+$"}, "@12@", True),
    ({"type": "string", "pattern": "^[0-9]+$"}, "@1a@", False),
    ({"type": ["string", "null"]}, "null", True),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "@1@", True),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "1", True),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "true", False),
    (EITHER, "{a:1}", True),
    (EITHER, "{a:1,b:2}", True),
    (EITHER, "{a:@1@}", False),
    (EITHER, "{}", False),
    (OF_KIND, "{kind:@a@,n:1}", True),
    (OF_KIND, "{kind:@a@}", True),
    (OF_KIND, "{n:1}", False),
    (OF_KIND, "{kind:@a@,n:@1@}", False),
    ({"type": "string", "anyOf": [{"pattern": "^a"}, {"pattern": "^b"}]}, "@bc@", True),
    ({"type": "string", "anyOf": [{"pattern": "^a"}, {"pattern": "^b"}]}, "@c@", False),
    ({"type": "string", "anyOf": [{"pattern": "^a"}, {"pattern": "^b"}]}, "1", False),
    ({"type": ["integer", "null"], "minimum": 3}, "null", True),
    ({"type": ["integer", "null"], "minimum": 3}, "2", False),
    ({"type": "integer", "minimum": 3, "maximum": 12}, "12", True),
    ({"type": "integer", "minimum": 3, "maximum": 12}, "2", False),
    ({"type": "number"}, "-1.5e3", True),
    ({"type": "boolean"}, "false", True),
    ({"enum": ["a", 1, None, [True]]}, "@a@", True),
    ({"enum": ["a", 1, None, [True]]}, "null", True),
    ({"enum": ["a", 1, None, [True]]}, "[true]", True),
    ({"enum": ["a", 1, None, [True]]}, "@b@", False),
    ({"const": {"b": 1, "A": "c"}}, "{A:@c@,b:1}", True),
    ({"allOf": [{"type": "boolean"}]}, "true", True),
    ({"type": "array", "items": {"type": "integer"}}, "[]", True),
    ({"type": "array", "items": {"type": "integer"}}, "[1,2,3]", True),
    ({"type": "array", "items": {"type": "integer"}}, "[1,@2@]", False),
    ({"type": "array", "minItems": 2, "maxItems": 3}, "[@a@]", False),
    ({"type": "array", "minItems": 2, "maxItems": 3}, "[@a@,{b:[1,null]},[]]", True),
    ({"type": "array", "minItems": 2, "maxItems": 3}, "[1,2,3,4]", False),
    ({"type": "array", "minItems": 1, "maxItems": 1}, "[1]", True),
    ({"type": "array", "minItems": 1, "maxItems": 1}, "[1,2]", False),
    ({"type": "array", "maxItems": 1}, "[]", True),
    ({"type": "array", "maxItems": 1}, "[1,2]", False),
    ({"type": "array", "minItems": 2}, "[1,2,3,4]", True),
    ({"type": "array", "minItems": 2}, "[1]", False),
    ({"type": "array", "maxItems": 0}, "[]", True),
    ({"type": "object", "properties": {"b": {}, "A": {}}, "required": ["b"]}, "{A:1,b:{c:@d@}}", True),
    ({"type": "object", "properties": {"b": {}, "A": {}}, "required": ["b"]}, "{b:2}", True),
    ({"type": "object", "properties": {"b": {}, "A": {}}, "required": ["b"]}, "{b:2,A:1}", False),  # as templates sort
    ({"type": "object", "properties": {"b": {}, "A": {}}, "required": ["b"]}, "{A:2}", False),
    ({"properties": {"b": {}}}, "{b:2,c:1}", False),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, "{any:1,key:2}", True),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, "{any:@1@}", False),
    ({"type": "object", "additionalProperties": {"type": "integer"}, "required": ["k"]}, "{k:1}", True),
    ({"type": "object", "additionalProperties": {"type": "integer"}, "required": ["k"]}, "{k:@1@}", False),
    ({"type": "object", "additionalProperties": False}, "{}", True),
    ({"type": "object", "additionalProperties": False}, "{a:1}", False),
    ({"$ref": "#/$defs/Tree"}, "{below:[{below:[],name:@b@}],name:@a@}", True),
    ({"$ref": "#/$defs/Tree"}, "{below:[{below:[]}],name:@a@}", False),
    ({}, "{a:[1,@b@,{c:null}]}", True),
    (True, "@a@", True),
]


@pytest.mark.parametrize("form", ["gemma4", "functiongemma"])
@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize(("schema", "written", "fits"), VALUES)
def test_what_fits_a_schema_may_be_written(
    form: Any, is_special: bool, schema: Any, written: str, fits: bool, tmp_path: Path
) -> None:
    begin, end, mark = MARKERS[form]
    tokenizer = with_special(tmp_path, *(MARKERS[form] if is_special else ()))
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"], "$defs": {"Tree": TREE}}
    structured = bound(form, False, [{"name": "f", "parameters": parameters}])
    text = f"{begin}call:f{{x:{written.replace('@', mark)}}}{end}" * 2
    [token_ids] = tokenizer.encode_batch([text], False)
    constraint = Grammars(tokenizer).constraint(structured)
    accepted = all(constraint.accept(token) is None for token in token_ids)
    assert (accepted and constraint.progress() == "whole") is fits
    if fits:
        assert len(split_calls(text, form).calls) == 2
        assert BoundCallsParser(structured).parse(text, "stop") == (None, None)


def test_each_function_has_definitions_of_its_own(tmp_path: Path) -> None:
    functions: list[dict[str, Any]] = [
        {"name": name, "parameters": {"properties": {"x": {"$ref": "#/$defs/T"}}, "$defs": {"T": {"type": kind}}}}
        for name, kind in (("f", "boolean"), ("g", "integer"))
    ]
    tokenizer = with_special(tmp_path)
    [token_ids] = tokenizer.encode_batch(["<|tool_call>call:g{x:5}<tool_call|>"], False)
    constraint = Grammars(tokenizer).constraint(bound("gemma4", True, functions))
    assert all(constraint.accept(token) is None for token in token_ids) and constraint.progress() == "closed"


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"not": {"type": "string"}}, "not cannot be kept to"),
        ({"type": "object", "patternProperties": {"a": {}}}, "patternProperties cannot be kept to"),
        ({"allOf": [{"type": "string"}, {"minLength": 2}]}, "allOf several schemas"),
        ({"$ref": "#/$defs/nothing"}, "refers to '#/$defs/nothing', which is not there"),
        ({"$ref": "https://example.org/schema"}, "which is no place in it"),
        ({"enum": ['a<|"|>']}, "it has the mark of texts"),
        ({"type": "object", "properties": {"a:b": {}}}, "'a:b' cannot be written"),
    ],
)
def test_what_cannot_be_kept_to_is_refused(schema: dict[str, Any], said: str) -> None:
    parameters = {"type": "object", "properties": {"x": schema}}
    with pytest.raises(ValueError, match=r".") as error:
        check_grammar(bound("gemma4", True, [{"name": "f", "parameters": parameters}]))
    assert said in str(error.value)
    for name, key in (("a b", "x"), ("f", "x{")):
        with pytest.raises(ValueError, match="cannot be written in this format"):
            check_grammar(bound("gemma4", True, [{"name": name, "parameters": {"properties": {key: {}}}}]))


def test_a_schema_too_deep_is_refused() -> None:
    deep: Any = {"type": "string"}
    for _ in range(800):
        deep = {"type": "array", "items": deep}
    with pytest.raises(ValueError, match=r"."):
        check_grammar(
            bound("gemma4", True, [{"name": "f", "parameters": {"properties": {"x": json.loads(json.dumps(deep))}}}])
        )
