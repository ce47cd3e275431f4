"""What the body of an OpenAI request says its answer must look like: a JSON schema, a regex, choices or a grammar.

OpenAI says it by `response_format`, in /v1/responses by `text.format`, vLLM by `structured_outputs`, and by
`guided_...` before. Whether a regex or a grammar can be used shows when it is compiled: then its row is
`grammar_failed`. Knows no other parameters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from bulkrun.data.types.json_types import is_unicode
from bulkrun.job.prompts.body_keys import TEXT_FORMAT, BadBody, as_object
from bulkrun.job.prompts.conversations import shown

# A JSON schema as its text, or {kind: value} for the other kinds: how `sampling.structured_outputs` of a row is kept.
Structure = str | dict[str, Any]


def structure_of(body: Mapping[str, Any]) -> Structure | None:
    """What the answer must look like; None where any text will do. Raises BadBody."""
    given = {
        key: found for key, read in _READERS.items() if key in body and (found := read(key, body[key])) is not None
    }
    if len(given) > 1:
        first, second = list(given)[:2]
        raise BadBody(f"body.{second}: given together with {first}; write one of them")
    return next(iter(given.values()), None)


def _of_response_format(key: str, value: Any) -> Structure | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return _any_object()
    if kind == "json_schema":
        inner = value.get("json_schema")
        # A schema is optional there: any JSON object will do then.
        schema = inner.get("schema", {"type": "object"}) if isinstance(inner, dict) else None
        return _schema(f"{key}.json_schema.schema", schema)
    raise BadBody(f"body.{key}: {shown(value)} is not supported; types text, json_object, json_schema are")


def _of_text_format(key: str, value: Any) -> Structure | None:
    """As `response_format`, but that name and schema stand beside the type, and that a schema has to be there."""
    if not isinstance(value, dict) or value.get("type") != "json_schema":
        return _of_response_format(key, value)
    if "schema" not in value:
        raise BadBody(f"body.{key}.schema: missing; it stands beside type and name")
    return _schema(f"{key}.schema", value["schema"])


def _of_structured_outputs(key: str, value: Any) -> Structure | None:
    """Nulls and switches that are off ask for nothing."""
    given = (
        {kind: inner for kind, inner in value.items() if inner is not None and inner is not False}
        if (isinstance(value, dict))
        else {}
    )
    if given == {"json_object": True}:
        return _any_object()
    if len(given) != 1 or not given.keys() <= KINDS.keys():
        raise BadBody(f"body.{key}: {shown(value)}; exactly one of {', '.join(KINDS)} is supported in it")
    [(kind, inner)] = given.items()
    return KINDS[kind](f"{key}.{kind}", inner)


def _any_object() -> str:
    return json.dumps({"type": "object"})


def _schema(key: str, value: Any) -> str:
    """The text of a schema given as an object, or as its JSON text."""
    return json.dumps(as_object(f"body.{key}", value, "a JSON schema"))


def _regex(key: str, value: Any) -> Structure:
    return {"regex": _text(key, value)}


def _grammar(key: str, value: Any) -> Structure:
    return {"grammar": _text(key, value)}


def _choice(key: str, value: Any) -> Structure:
    if not isinstance(value, list) or not value:
        raise BadBody(f"body.{key}: {shown(value)} is not a list of texts, one at least")
    return {"choice": [_text(key, text) for text in value]}


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str) or not is_unicode(value):
        raise BadBody(f"body.{key}: {shown(value)} is not text")
    return value


_Reader = Callable[[str, Any], Structure | None]
KINDS: dict[str, _Reader] = {"json": _schema, "regex": _regex, "choice": _choice, "grammar": _grammar}
_READERS: dict[str, _Reader] = {
    "response_format": _of_response_format,
    TEXT_FORMAT: _of_text_format,
    "structured_outputs": _of_structured_outputs,
    **{f"guided_{kind}": read for kind, read in KINDS.items()},
}
