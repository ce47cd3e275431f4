"""JSON objects as the dataclasses of this bulkrun: workers of several versions may share one directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from bulkrun.errors import RunError

_T = TypeVar("_T")


def from_document(kind: type[_T], document: Mapping[str, Any], path: Path, what: str) -> _T:
    """The object that `path` holds as `what`. Raises RunError where its keys are not those of this version.

    No key may be ignored: the object decides something, or is written again.
    """
    try:
        return kind(**document)
    except TypeError as error:
        raise RunError(
            f"{path}: not {what} of this bulkrun ({_complaint(error)}); it was written by a newer bulkrun "
            "(use that version) or by another program"
        ) from error


def _complaint(error: TypeError) -> str:
    """The part of Python's message that is about the object: unexpected keyword argument 'x'."""
    return str(error).partition("() ")[2].removeprefix("got an ") or str(error)


def advice_from(kind: type[_T], document: Mapping[str, Any]) -> _T | None:
    """As `from_document` for advisory files: unknown keys are ignored.

    None where a required key is missing.
    """
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    try:
        return kind(**{name: value for name, value in document.items() if name in known})
    except TypeError:
        return None
