"""Grammars: what is refused, in which words, and how fast."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from bulkrun.request import StructuredOutput
from bulkrun.text.grammar import check_grammar, short_message


def schema(value: dict[str, Any]) -> StructuredOutput:
    return StructuredOutput("json", json.dumps(value))


@pytest.mark.parametrize(
    "structured",
    [
        schema({"type": "object", "properties": {"a": {"type": "integer"}}}),
        schema({"oneOf": [{"type": "object", "properties": {"a": {"type": "integer"}}}, {"type": "object"}]}),
        StructuredOutput("regex", r"[0-9]{4}-\d\d"),
        StructuredOutput("choice", json.dumps(["yes", 'with "quotes"', "new\nline", "é 😀", "back\\slash", ""])),
        StructuredOutput("grammar", 'start: "a" more\nmore: /[bc]+/'),
    ],
)
def test_usable_grammars_pass(structured: StructuredOutput) -> None:
    check_grammar(structured)


@pytest.mark.parametrize(
    ("structured", "said"),
    [
        (schema({"type": "strin"}), "Invalid type: strin"),
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema({"$ref": "#/$defs/missing"}), "/$defs/missing"),
        (schema({"$ref": "https://example.com/schema.json"}), "does not fetch"),
        (StructuredOutput("json", "{"), "line 1 column 2"),
        (StructuredOutput("regex", "(ab"), "unclosed group"),
        (StructuredOutput("regex", "(?=a)b"), "look-around"),
        (StructuredOutput("grammar", 'start: "a" nowhere'), 'unknown name: "nowhere"'),
        (StructuredOutput("regex", "a" * 300_000), "300000 characters"),
    ],
)
def test_an_unusable_grammar_is_refused_in_one_short_line(structured: StructuredOutput, said: str) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        check_grammar(structured)
    message = str(refused.value)
    assert said in message
    assert "\n" not in message
    assert len(message) <= 300


def _all_of_bomb() -> dict[str, Any]:
    definitions: dict[str, Any] = {"a0": {"type": "string"}}
    for i in range(1, 25):
        definitions[f"a{i}"] = {"allOf": [{"$ref": f"#/$defs/a{i - 1}"}] * 2}
    return {"$ref": "#/$defs/a14", "$defs": definitions}


def _product() -> dict[str, Any]:
    one_of = [{"type": "object", "properties": {f"k{i}": {"type": "integer"}}, "required": [f"k{i}"]} for i in range(8)]
    return {"allOf": [{"anyOf": one_of}] * 8}


def _chain() -> str:
    """In GBNF, whose translator looks at all rules again for each that it has found to be one terminal."""
    return "root ::= a0\n" + "".join(f"a{i}::=a{i + 1}\n" for i in range(2400)) + 'a2400::="x"\n'


@pytest.mark.parametrize(
    "structured",
    [
        schema(_all_of_bomb()),
        schema(_product()),
        schema({"enum": [f"value {i}" for i in range(15_000)]}),
        schema({"type": "array", "items": {"type": "integer"}, "minItems": 10**6, "maxItems": 10**9}),
        schema({"type": "string", "minLength": 10**6}),
        StructuredOutput("grammar", _chain()),
        StructuredOutput("regex", "((a{1,100}){1,100}){1,100}"),
        StructuredOutput("regex", "(a|b)*a(a|b){200}"),
        StructuredOutput("regex", "(a+)+b"),
    ],
    ids=[
        "allOf bomb",
        "product of alternatives",
        "enum",
        "items",
        "length",
        "chain",
        "counts",
        "states",
        "backtracking",
    ],
)
def test_a_hostile_grammar_does_not_hang(structured: StructuredOutput) -> None:
    begin = time.process_time()
    try:
        check_grammar(structured)
    except ValueError as problem:
        assert "too" in str(problem)
    assert time.process_time() - begin < 5  # all take under half a second; a busy machine is given ten times that


def test_a_message_is_cut() -> None:
    assert short_message("at 1(8): bad\n   ^^^\n<state>\nTokens: 12") == "at 1(8): bad"
    assert len(short_message("x" * 1000)) == 300


def test_a_pattern_that_cannot_be_used_is_named_by_its_place() -> None:
    schema = {"properties": {"a": {"type": "string"}, "b": {"items": {"type": "string", "pattern": "(?=x)y"}}}}
    with pytest.raises(ValueError, match=r"^at \$\.properties\.b\.items\.pattern: look-around.*: \(\?=x\)y$"):
        check_grammar(StructuredOutput("json", json.dumps(schema)))
    with pytest.raises(ValueError, match=r"^unclosed group: \(x$"):
        check_grammar(StructuredOutput("regex", "(x"))
