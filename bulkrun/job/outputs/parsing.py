"""Finished texts against what the job asked of them: parsed values of those that fit, an error for those that do not.

A text is parsed as it is, never repaired: one that was cut off is flagged. Regular expressions and grammars are the
engine's to keep to (Python reads some of them differently, or takes forever); what is checked here is that the output
came to its end, or to one that fits where its limit or a stop ended it. Knows no tokens and no files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from fractions import Fraction
from math import isinf
from typing import Any, NoReturn

import jsonschema
import pyarrow as pa
import referencing
from jsonschema.exceptions import best_match
from jsonschema.validators import extend
from referencing.exceptions import Unresolvable

from bulkrun.data.results.json_schema import arrow_type, to_arrow_value
from bulkrun.errors import shortened
from bulkrun.request import Progress, RowError, StructuredOutput

MAX_SHOWN = 80
# A JSON value that ends with one of these is whole when it parses; a number may be the start of a longer one.
_CLOSED = ("}", "]", '"', "true", "false", "null")


def _trusted(*_: Any) -> None:
    """A keyword that the grammar keeps to; Python's `re` refuses some patterns and hangs on others."""


def _additional_properties(
    validator: Any, allowed: Any, value: Any, schema: Any
) -> Iterator[jsonschema.ValidationError]:
    if "patternProperties" not in schema:  # which names are additional is a matter of patterns
        yield from jsonschema.Draft202012Validator.VALIDATORS["additionalProperties"](validator, allowed, value, schema)


def _multiple_of(validator: Any, divisor: float, value: Any, _schema: Any) -> Iterator[jsonschema.ValidationError]:
    """As they are written: to doubles 19.99 is no multiple of 0.01."""
    if not validator.is_type(value, "number"):
        return
    is_infinite = isinstance(value, float) and isinf(value)  # written as 1e999
    if is_infinite or Fraction(str(value)) % Fraction(str(divisor)):
        yield jsonschema.ValidationError(f"{value!r} is not a multiple of {divisor!r}")


def validator_class() -> Any:
    """The class of validators of finished texts: of what a grammar keeps to, and Python may not, they ask nothing."""
    by_grammar = {
        **dict.fromkeys(("pattern", "patternProperties", "unevaluatedProperties"), _trusted),
        "additionalProperties": _additional_properties,
        "multipleOf": _multiple_of,
    }
    made: Any = extend(jsonschema.Draft202012Validator, by_grammar)  # type: ignore[no-untyped-call]
    evolve = made.evolve

    def evolve_in_class(self: Any, **changes: Any) -> Any:
        """The validator of a part of the schema. Where the part says `$schema`, jsonschema would take a stock class."""
        schema = changes.get("schema", self.schema)
        if isinstance(schema, dict) and "$schema" in schema:
            changes["schema"] = {keyword: value for keyword, value in schema.items() if keyword != "$schema"}
        return evolve(self, **changes)

    made.evolve = evolve_in_class
    return made


class OutputParser:
    """Checks and parses the outputs of one kind of structure.

    `column` is the Arrow type of the result column `parsed`; default: that of the schema. References to other
    documents are not followed.
    """

    def __init__(self, structured: StructuredOutput, column: pa.DataType | None = None) -> None:
        self._structured = structured
        self._choices = frozenset(json.loads(structured.value)) if structured.kind == "choice" else frozenset()
        if structured.kind == "json":
            schema = json.loads(structured.value)
            self._validator = validator_class()(schema, registry=referencing.Registry())
            self._column = arrow_type(schema) if column is None else column

    def parse(self, text: str, finish_reason: str, progress: Progress | None = None) -> tuple[Any, RowError | None]:
        """The value for the column `parsed` (None for other kinds than `json`), or why the text is not an answer.

        `progress` says where an output stands that its limit or a stop ended, None is for one that the model ended. A
        regex that it fits is kept to though it could have gone on; a number that could have is taken for cut, since
        half of it would be another value.
        """
        try:
            if self._structured.kind == "json":
                return self._parse_json(text, progress), None
            self._check_text(text, progress)
        except ValueError as problem:
            return None, RowError("invalid_schema", f"{problem}{what_cut(finish_reason, progress)}")
        return None, None

    def _check_text(self, text: str, progress: Progress | None) -> None:
        if self._choices and text not in self._choices:
            raise ValueError(f"{shortened(repr(text), MAX_SHOWN)} is not one of the choices")
        if not self._choices and progress == "unfinished":
            raise ValueError(f"the output ends before its {self._structured.kind} is complete")

    def _parse_json(self, text: str, progress: Progress | None) -> Any:
        try:
            value = json.loads(text, parse_constant=_no_constant)
            problem = best_match(self._validator.iter_errors(value))
        except RecursionError:
            raise ValueError("the JSON is nested too deeply") from None
        except Unresolvable as unresolvable:
            raise ValueError(f"the schema refers to {unresolvable.ref!r}, which is not in it") from None
        except ValueError as broken:
            raise ValueError(f"not valid JSON: {broken}") from None
        if problem is not None:
            raise ValueError(
                f"does not fit the schema: at {problem.json_path}: {shortened(problem.message, MAX_SHOWN)}"
            )
        if progress in ("unfinished", "whole") and not text.rstrip().endswith(_CLOSED):
            raise ValueError("the JSON may go on")
        return to_arrow_value(value, self._column)


def what_cut(finish_reason: str, progress: Progress | None) -> str:
    """What ended an output that the model had not ended, and what to do about it."""
    if finish_reason == "length":
        return (
            " (cut at max_tokens or the model's length: raise sampling.max_tokens, or the row's own, or shorten the "
            "prompt)"
        )
    if progress is None:
        return ""
    return " (cut by sampling.stop or sampling.stop_token_ids: remove what may occur in an output)"


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
