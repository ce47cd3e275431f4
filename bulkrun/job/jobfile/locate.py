"""Where in the job file the key stands that a later error is about: columns, paths and models are looked at last."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bulkrun.errors import BulkrunError, JobFileError
from bulkrun.job.jobfile.strict_yaml import Document, key_name, parse_yaml

_KEY = re.compile(r"([a-z_]+(?:\.[a-z_]+|\.\d+|\[\d+\])*)(?=: )")
_LAST_PART = re.compile(r"(^|\.|\[)[^.\[]*$")


@contextmanager
def located(path: Path, overrides: Sequence[str] = ()) -> Iterator[None]:
    """Put `file:line:col: ` before each line of a BulkrunError of the body that begins with a key of the job at `path`.

    A key that is not there has the place of its section; one that a `--set` value of `overrides` gave has none.
    """
    try:
        yield
    except BulkrunError as error:
        document = _document(path)
        given = {override.partition("=")[0].strip() for override in overrides}
        lines = [_with_place(line, path, document, given) for line in str(error).split("\n")]
        error.args = ("\n".join(lines),)
        if isinstance(error, JobFileError):
            error.problems = lines
        raise


def _document(path: Path) -> Document:
    try:
        return parse_yaml(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError):
        return Document()


def _with_place(line: str, path: Path, document: Document, given: set[str]) -> str:
    found = _KEY.match(line)
    if found is None:
        return line
    key = re.sub(r"\.(\d+)", r"[\1]", found[1])
    if any(key == name or key.startswith(f"{name}.") for name in given):
        return f"--set {line}"
    marks = {key_name(place): mark for place, mark in document.marks.items() if place}
    while key and key not in marks:
        key = _LAST_PART.sub("", key)
    return f"{path}:{marks[key][0]}:{marks[key][1]}: {line}" if key else line
