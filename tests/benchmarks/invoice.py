"""What a structured output of a benchmark looks like: an invoice as JSON, most of whose text the schema dictates.

Standard library only: it also runs in the environments of peers. Every text and number has an end, so that a model
with random weights comes to one.
"""

from __future__ import annotations

import json
from typing import Any


def _text(longest: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": longest}


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMA = _object(
    invoice_number=_text(12),
    customer_name=_text(16),
    billing_address=_object(street=_text(16), postal_code=_text(6), country_code=_text(2)),
    total_amount={"type": "integer", "minimum": 0, "maximum": 99_999},
    is_overdue={"type": "boolean"},
    payment_method={"enum": ["credit_card", "bank_transfer", "cash_on_delivery"]},
)


def pattern() -> str:
    """The same as a regular expression, without the white space that a schema leaves open; no text needs an escape."""
    return _pattern(SCHEMA)


def _pattern(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return "(" + "|".join(f'"{value}"' for value in schema["enum"]) + ")"
    if schema["type"] == "object":
        members = (f'"{name}": {_pattern(inner)}' for name, inner in schema["properties"].items())
        return r"\{" + ", ".join(members) + r"\}"
    if schema["type"] == "string":
        return f'"[A-Za-z0-9 .,-]{{0,{schema["maxLength"]}}}"'
    return {"integer": "(0|[1-9][0-9]{0,4})", "boolean": "(true|false)"}[schema["type"]]


def is_invoice(text: str) -> bool:
    """Whether it is JSON with the names and kinds of values that the schema wants; lengths are not looked at.

    Control characters in texts are let through: vLLM's default (xgrammar) allows them, and random weights write them.
    """
    try:
        return _fits(json.loads(text, strict=False), SCHEMA)
    except ValueError:
        return False


def _fits(value: Any, schema: dict[str, Any]) -> bool:
    if "enum" in schema:
        return value in schema["enum"]
    if schema["type"] == "object":
        properties = schema["properties"]
        return (
            isinstance(value, dict)
            and value.keys() == properties.keys()
            and all(_fits(value[name], inner) for name, inner in properties.items())
        )
    return type(value) is {"string": str, "integer": int, "boolean": bool}[schema["type"]]
