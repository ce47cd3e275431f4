"""What an output must look like, as a llguidance grammar: JSON schema, regex, choice, grammar, calls. Knows no models.

A JSON output has at most one space after a separator and no other white space between its values: it reads as models
write one-line JSON, and there is nothing to repeat forever. The limits below keep a hostile schema from taking long: a
grammar that needs more is refused, when it is compiled or at the token where it becomes too ambiguous.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from llguidance import LLMatcher, LLParserLimits

from bulkrun.request import StructuredOutput
from bulkrun.text.closed_schema import closed
from bulkrun.text.gbnf import lark_of
from bulkrun.text.schema_formats import without_unknown_formats
from bulkrun.text.tool_grammar import JSON_OPTIONS, SpecialId, calls_grammar

_MAX_CHARACTERS = 256 * 2**10  # compiling takes seconds at this size, and grows with its square
_MAX_MESSAGE = 300


def parser_limits() -> LLParserLimits:
    """Compiling: at most about 20 ms of lexer building. One mask: at most about 15 ms of lexer, 3 ms of parser."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_items_in_row=2_000,
        max_lexer_states=250_000,
        max_grammar_size=500_000,
        verbose_errors=False,
    )


def to_grammar(structured: StructuredOutput, special_id: SpecialId = lambda _text: None) -> str:
    """The grammar as llguidance reads it; most of its mistakes show only when it is compiled. Raises ValueError.

    `special_id` tells the special tokens of the tokenizer that will write it, for the markers of calls.
    """
    if len(structured.value) > _MAX_CHARACTERS:
        raise ValueError(f"has {len(structured.value)} characters; at most {_MAX_CHARACTERS} are possible")
    if structured.kind == "json":
        return _json_grammar(structured.value)
    if structured.kind == "tool_calls":
        return LLMatcher.grammar_from_lark(calls_grammar(structured.value, special_id))
    if structured.kind == "regex":
        return LLMatcher.grammar_from_regex(structured.value)
    if structured.kind == "choice":
        texts = json.loads(structured.value)
        # One terminal: as rules, 2,000 of them are more than a row of the parser may hold.
        return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text) for text in texts))
    return LLMatcher.grammar_from_lark(lark_of(structured.value))


def spells(structured: StructuredOutput, texts: Iterable[str]) -> bool:
    """Whether one of the texts stands in what an output must look like."""
    is_json = structured.kind in ("json", "choice", "tool_calls")
    text = json.dumps(json.loads(structured.value), ensure_ascii=False) if is_json else structured.value
    return any(one in text for one in texts)


def without_forcing(grammar: str) -> str:
    """The grammar, which allows every token that fits.

    Where only one text can follow, llguidance allows nothing but the token that the model's tokenizer begins it with.
    Of a text that is the name of a special token that is the special token, which reads as nothing.
    """
    if grammar.startswith("{"):
        [inner] = json.loads(grammar)["grammars"]
        grammar = inner.get("lark_grammar") or f"start: %json {json.dumps(inner['json_schema'])}"
    return f'%llguidance {{"no_forcing": true}}\n{grammar}'


def check_grammar(structured: StructuredOutput) -> None:
    """Compile the grammar for no tokenizer. Raises ValueError with what cannot be used and where."""
    is_error, messages = LLMatcher.validate_grammar_with_warnings(to_grammar(structured), None, limits=parser_limits())
    if is_error:
        place = _bad_pattern(json.loads(structured.value)) if structured.kind == "json" else None
        message = short_message(messages[0])
        if structured.kind == "regex":
            message = re.sub(r"^at \d+\(\d+\): invalid regex .* \(in regex\): ", "", message)
        raise ValueError(f"at {place}: {message}" if place else message)


def _bad_pattern(schema: Any, place: str = "$") -> str | None:
    """Where in a schema a `pattern` stands that cannot be used; None where it is not a pattern's fault."""
    if isinstance(schema, dict) and isinstance(pattern := schema.get("pattern"), str):
        alone = json.dumps({"type": "string", "pattern": pattern})
        if LLMatcher.validate_grammar_with_warnings(_json_grammar(alone), None, limits=parser_limits())[0]:
            return f"{place}.pattern"
    inner = schema.items() if isinstance(schema, dict) else enumerate(schema) if isinstance(schema, list) else ()
    return next((found for key, value in inner if (found := _bad_pattern(value, f"{place}.{key}"))), None)


def short_message(problem: str) -> str:
    """llguidance's message in one line, without the dump of its state and the picture of the place."""
    text = re.split(r"<state>|<non-verbose/>", problem)[0]
    text = re.sub(r"regex parse error:\s*\n\s*(.*)\n[ ^]*\nerror: (.*)", r"\2: \1", text)
    lines = [line.strip() for line in text.splitlines()]
    message = "; ".join(line for line in lines if line and not re.fullmatch(r"\^+|\d+ \|.*", line))
    return message if len(message) <= _MAX_MESSAGE else f"{message[: _MAX_MESSAGE - 3]}..."


def _json_grammar(schema: str) -> str:
    try:
        text = json.dumps(closed(without_unknown_formats(json.loads(schema))))
        return LLMatcher.grammar_from_json_schema(text, overrides=dict(JSON_OPTIONS))  # type: ignore[arg-type]
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as problem:
        raise ValueError(short_message(str(problem))) from None
