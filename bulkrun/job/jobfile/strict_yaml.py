"""YAML without its traps: plain data, the place of every key in the file, and all problems at once. Knows no keys.

YAML 1.1 reads NO as false, 12:30 as 750 and 010 as 8, and PyYAML takes the last of two equal keys: here each is a
problem that says what to write instead. Dates stay text, 1e-3 is a number, 1e999 is none. Anchors work, but not to
blow a file up.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

from bulkrun.data.types.json_types import is_unicode

Path = tuple[str | int, ...]

MAX_NODES = 100_000  # values in the file with every alias written out
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?")
_TAG = "tag:yaml.org,2002:"
_NOT_TEXT = "holds a NUL (\\0) or half a surrogate pair (\\ud800-\\udfff), which is not text"
_TEXT_TAGS = {_TAG + name for name in ("str", "timestamp", "value", "merge")}


class Problem(NamedTuple):
    """One thing that is wrong. `line` and `column` count from 1."""

    line: int
    column: int
    key: str
    what: str


@dataclass
class Document:
    """What a YAML text says. `marks` gives (line, column) of the key or list item at each path; () is the start.

    A value with a problem is `UNUSABLE` in `value`.
    """

    value: Any = None
    marks: dict[Path, tuple[int, int]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


class _Unusable:
    def __repr__(self) -> str:
        return "UNUSABLE"


UNUSABLE = _Unusable()


def parse_yaml(text: str) -> Document:
    """The document in `text`; where that is not YAML at all, the value is UNUSABLE and the problem says why."""
    document = Document(UNUSABLE)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        document.value = _Builder(document).build(node, ()) if node else None
        document.marks.setdefault((), (1, 1))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        what = str(error.problem or error.context)
        what += "; indent with spaces, not with a tab" if "'\\t'" in what else ""
        if error.context and (begun := error.context_mark) and begun.line + 1 < line:  # a quote that is never closed
            what += f" ({error.context} that begins at {begun.line + 1}:{begun.column + 1})"
        document.problems.append(Problem(line, column, "", f"not valid YAML: {what}"))
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        document.problems.append(
            Problem(line, 1, "", f"not valid YAML: the character {chr(error.character)!r} is not allowed")
        )
    except RecursionError:
        document.problems.append(Problem(1, 1, "", "nested too deeply"))
    except _TooMany as error:
        document.problems.append(error.problem)
    return document


def key_name(path: Path) -> str:
    """A path as the user would write it: ``prompt.messages[0].role``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


class _TooMany(Exception):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.what)
        self.problem = problem


class _Builder:
    """Turns nodes into data, collecting marks and problems in `document`."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._nodes = 0

    def build(self, node: yaml.Node, path: Path) -> Any:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            what = f"more than {MAX_NODES} values with the aliases written out"
            raise _TooMany(Problem(node.start_mark.line + 1, node.start_mark.column + 1, key_name(path), what))
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return [self._item(item, (*path, number)) for number, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        return self._problem(node, path, f"the tag {_short(node.tag)} is not allowed in a job file")

    def _item(self, node: yaml.Node, path: Path) -> Any:
        self._mark(node, path)
        return self.build(node, path)

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node, path)
            if key is None:
                continue
            if key in values:
                first = self._document.marks[(*path, key)][0]
                self._problem(key_node, (*path, key), f"the key appears twice (first on line {first}); keep one")
                continue
            self._mark(key_node, (*path, key))
            values[key] = self.build(value_node, (*path, key))
        return values

    def _key(self, node: yaml.Node, path: Path) -> str | None:
        if isinstance(node, yaml.ScalarNode) and node.tag == _TAG + "merge":
            self._problem(node, path, "merge keys (<<) are not allowed in a job file; write the keys out")
        elif not isinstance(node, yaml.ScalarNode) or node.tag not in _TEXT_TAGS:
            shown = f"the key {node.value} is" if isinstance(node, yaml.ScalarNode) else "a key is"
            self._problem(node, path, f"{shown} not text; quote it")
        elif not _is_text(node.value):
            self._problem(node, path, f"a key {_NOT_TEXT}")
        else:
            return str(node.value)
        return None

    def _scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        text, tag = str(node.value), node.tag
        plain = tag == _TAG + "str" and node.style is None
        if (plain or tag == _TAG + "float") and _FLOAT.fullmatch(text):  # 1e-3: a number to everyone but YAML 1.1
            number = float(text)
            return number if math.isfinite(number) else self._problem(node, path, f"{text:.40} is too large a number")
        if not _is_text(text):
            return self._problem(node, path, _NOT_TEXT)
        if tag in _TEXT_TAGS:
            return text
        if tag == _TAG + "null":
            return None
        if tag == _TAG + "bool" and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if tag == _TAG + "int" and _INT.fullmatch(text) and len(text) < 1000:
            return int(text)
        return self._problem(node, path, _what_to_write(text, tag))

    def _mark(self, node: yaml.Node, path: Path) -> None:
        self._document.marks[path] = (node.start_mark.line + 1, node.start_mark.column + 1)

    def _problem(self, node: yaml.Node, path: Path, what: str) -> _Unusable:
        mark = node.start_mark
        self._document.problems.append(Problem(mark.line + 1, mark.column + 1, key_name(path), what))
        return UNUSABLE


def _is_text(text: str) -> bool:
    """Whether files, templates and queries can hold it: YAML's escapes can write what no text is."""
    return "\0" not in text and is_unicode(text)


def _what_to_write(text: str, tag: str) -> str:
    if tag == _TAG + "bool":
        return f'YAML reads {text} as true or false; write true or false, or quote it ("{text}") if it is text'
    if tag in (_TAG + "int", _TAG + "float"):
        fix = f'write plain digits, or quote it ("{text}") if it is text'
        return f"YAML does not read {text} as the number it looks like; {fix}"
    return f"the tag {_short(tag)} is not allowed in a job file"


def _short(tag: str) -> str:
    return tag.replace(_TAG, "!!")
