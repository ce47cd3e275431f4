"""The `pattern` of a JSON schema as a regex that a whole text fits, in the words of Lark.

To JSON schema a pattern fits where it is found anywhere in a text; `^` and `$` hold it to the ends. They are known at
the ends of its alternatives; elsewhere llguidance refuses them, as all that looks around. Knows no grammar.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

ANY = "(?s:.*)"
_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)  # of a regex: an escape, a class, a character


_MAX_LENGTH = 1000  # of a text whose length is kept to: each character more is a state


def text_regex(schema: Mapping[str, Any], never: str) -> str:
    """How a text looks that fits a schema, as Lark reads it. The regex `never` is not found in it."""
    pattern = "" if "pattern" not in schema else f" & {regex_of_pattern(schema['pattern'])}"
    return f"(/(?s:.{_length(schema)})/ & ~{regex(f'{ANY}{never}{ANY}')}{pattern})"


def _length(schema: Mapping[str, Any]) -> str:
    least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
    if max(least, most or 0) > _MAX_LENGTH:
        return "*"
    return f"{{{least},}}" if most is None else f"{{{least},{int(most)}}}"


def regex_of_pattern(pattern: str) -> str:
    """As Lark reads it, between slashes."""
    return regex("|".join(map(_whole, _alternatives(pattern))))


def regex(written: str) -> str:
    """A regex between slashes."""
    parts = ({"/": "\\/", "\n": "\\n"}.get(part, part) for part in re.findall(r"\\.|.", written, re.DOTALL))
    return f"/{''.join(parts)}/"


def _alternatives(pattern: str) -> list[list[str]]:
    """The parts of each alternative, outside of brackets."""
    found, depth = [list[str]()], 0
    for part in _PART.findall(pattern):
        depth += (part == "(") - (part == ")")
        if part == "|" and not depth:
            found.append([])
        else:
            found[-1].append(part)
    return found


def _whole(parts: list[str]) -> str:
    begins, ends = parts[:1] == ["^"], parts[-1:] == ["$"]
    body = "".join(parts[begins : len(parts) - ends])
    return f"{'' if begins else ANY}(?:{body}){'' if ends else ANY}"
