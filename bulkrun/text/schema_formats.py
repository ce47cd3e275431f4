"""JSON schemas without the formats that grammars do not know: to JSON schema such a format asks nothing of a text.

Pydantic writes many of them: of paths, passwords, relative URLs. Knows no grammar but by the formats it has.
"""

from __future__ import annotations

from typing import Any

from bulkrun.text.closed_schema import with_inner

KNOWN_FORMATS = frozenset({"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"})


def without_unknown_formats(schema: Any) -> Any:
    """The schema, in which a `format` is a known one. Takes any JSON value, and returns what is no schema as it is."""
    if not isinstance(schema, dict):
        return schema
    copy = with_inner(schema, without_unknown_formats)
    if isinstance(named := schema.get("format"), str) and named not in KNOWN_FORMATS:
        del copy["format"]
    return copy
