"""The keys of a job file as lines to read: name, type, default, description. Made from its JSON schema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from bulkrun.errors import UsageError, did_you_mean

_NAMES = {"string": "text", "integer": "whole number", "boolean": "true or false", "object": "mapping"}


class Key(NamedTuple):
    """One key, with the sections that it stands in: `sampling.thinking.start`; `[]` stands for each item of a list."""

    key: str
    type: str
    default: str
    description: str


def keys_below(schema: Mapping[str, Any], section: str | None = None) -> list[Key]:
    """Every key in `schema` (that of `job_schema`), or `section` and those in it. Raises UsageError for no section."""
    keys = list(_Reader(schema["$defs"]).keys(schema))
    if section is None:
        return keys
    found = [key for key in keys if key.key == section or key.key.startswith((f"{section}.", f"{section}[]."))]
    if not found:
        hint = did_you_mean(section, [key.key for key in keys], str) or f"there are {', '.join(schema['properties'])}"
        raise UsageError(f"schema: {section!r} is not a section or key of a job file; {hint}")
    return found


class _Reader:
    """Walks a schema whose sections are named in `sections`."""

    def __init__(self, sections: Mapping[str, Any]) -> None:
        self._sections = sections

    def keys(self, section: Mapping[str, Any], path: str = "") -> Iterator[Key]:
        """The keys of a section, each followed by those of the section that it holds."""
        for name, about in section["properties"].items():
            default = "required" if name in section.get("required", ()) else _default(about["default"])
            yield Key(path + name, self._type(about), default, about["description"])
            for inner, sign in self._inner(about):
                yield from self.keys(inner, f"{path}{name}{sign}.")

    def _inner(self, about: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], str]]:
        """The sections that a value may be or, with `[]`, be a list of."""
        for kind in about.get("anyOf", [about]):
            for holder, sign in ((kind, ""), (kind.get("items", {}), "[]")):
                if "$ref" in holder:
                    yield self._sections[holder["$ref"].removeprefix("#/$defs/")], sign

    def _type(self, about: Mapping[str, Any]) -> str:
        if "anyOf" in about:
            kinds = (self._type(kind) for kind in about["anyOf"] if kind.get("type") != "null")
            return " or ".join(dict.fromkeys(kinds))
        if "$ref" in about:
            return "section"
        if choices := about.get("enum", [about["const"]] if "const" in about else []):
            return ", ".join(map(str, choices))
        if about["type"] == "array":
            return f"list of {self._type(about['items'])}"
        return _NAMES.get(about["type"], str(about["type"]))


def _default(value: Any) -> str:
    """As it would be written in the file; nothing where the description says what comes of leaving the key out."""
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)
