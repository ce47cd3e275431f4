"""Whether a value is a JSON schema that can be worked with: valid, whole, and of a bearable size. Knows no Arrow.

References lead to places inside the schema only, nothing is ever fetched. A schema is measured with its references
followed, because a short one can say the same thing a million times over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from bulkrun.errors import shortened

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator

Schema = Mapping[str, Any] | bool

_MAX_PARTS = 200_000
_MAX_SHOWN = 120


def check_schema(schema: object) -> None:
    """Raise ValueError, with the place and what is wrong there, unless `schema` is a JSON schema (Draft 2020-12)."""
    if not isinstance(schema, dict):
        raise ValueError(
            f"{shortened(json.dumps(schema, default=str), _MAX_SHOWN)} is not an object with a JSON schema"
        )
    import jsonschema  # slow, and most jobs have no schema

    try:
        # No formats: whether a pattern can be used is for the engine to say, which does not use Python's `re`.
        if not _metaschema_in_one().is_valid(
            schema
        ):  # jsonschema's own way takes five times as long, and has the words
            jsonschema.Draft202012Validator.check_schema(schema, format_checker=jsonschema.FormatChecker(formats=()))
        num_parts = _num_parts(schema, schema, {})
    except jsonschema.SchemaError as problem:
        raise ValueError(
            f"not a JSON schema: at {problem.json_path}: {shortened(problem.message, _MAX_SHOWN)}"
        ) from None
    except RecursionError:
        raise ValueError("not a JSON schema that can be used: nested too deeply") from None
    if num_parts > _MAX_PARTS:
        raise ValueError(
            f"with its references followed, the schema has {num_parts:.0e} parts; at most {_MAX_PARTS:.0e}"
        )


@cache
def _metaschema_in_one() -> Draft202012Validator:
    """The schema of schemas as one document: its vocabularies, each with a few of the keywords, put together.

    As published they refer to each other by dynamic references, which are looked up anew for every value of a schema.
    """
    from jsonschema import Draft202012Validator
    from jsonschema_specifications import REGISTRY

    whole = Draft202012Validator.META_SCHEMA
    base, names = whole["$id"].removesuffix("schema"), [each["$ref"] for each in whole["allOf"]]
    documents = {"": whole, **{name: REGISTRY.contents(base + name) for name in names}}
    properties: dict[str, Any] = {}
    for name, document in documents.items():
        properties |= _moved(document["properties"], name)
    definitions = {_place(name): _moved(documents[name].get("$defs", {}), name) for name in names}
    return Draft202012Validator({"type": ["object", "boolean"], "properties": properties, "$defs": definitions})


def _moved(node: Any, document: str) -> Any:
    """A piece of a vocabulary's document with its references leading to where things are in the one document."""
    if isinstance(node, list):
        return [_moved(inner, document) for inner in node]
    if not isinstance(node, dict):
        return node
    moved = {key: _moved(inner, document) for key, inner in node.items() if key != "$dynamicRef"}
    if isinstance(reference := node.get("$ref"), str):
        name, _, pointer = reference.partition("#/$defs")
        moved["$ref"] = f"#/$defs/{_place(name or document)}{pointer}"
    if (target := node.get("$dynamicRef")) is not None:
        moved |= {"$ref": "#"} if isinstance(target, str) else {"$dynamicRef": _moved(target, document)}
    return moved


def _place(name: str) -> str:
    return name.replace("/", ".")


def referenced(reference: str, root: Schema) -> Schema | None:
    """The schema that a JSON pointer names, None for any other reference."""
    if not reference.startswith("#") or reference[1:2] not in ("", "/"):
        return None
    here: Any = root
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(here, Mapping) and key in here:
            here = here[key]
        elif isinstance(here, list) and key.isdecimal() and int(key) < len(here):
            here = here[int(key)]
        else:
            return None
    return here if isinstance(here, Mapping | bool) else None


def _num_parts(node: Any, root: Schema, known: dict[int, int]) -> int:
    """How many values the schema has when each reference stands for what it names. `known`: by identity."""
    if not isinstance(node, dict | list):
        return 1
    if id(node) not in known:
        known[id(node)] = 1  # a reference back to here goes no deeper
        inner = node if isinstance(node, list) else [*node.values(), _named(node, root)]
        known[id(node)] = 1 + sum(_num_parts(part, root, known) for part in inner)
    return known[id(node)]


def _named(node: dict[str, Any], root: Schema) -> Schema | None:
    """What the `$ref` of a schema names; raises ValueError where there is no such place in the schema."""
    reference = node.get("$ref")
    if not isinstance(reference, str):
        return None
    target = referenced(reference, root)
    if target is None:
        raise ValueError(f"the schema refers to {shortened(reference, _MAX_SHOWN)!r}, which is not in it")
    return target
