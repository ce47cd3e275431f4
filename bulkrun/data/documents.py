"""JSON objects as the dataclasses of this bulkrun: workers of several versions may share one directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from bulkrun.errors import RunError

_T = TypeVar("_T")


def from_document(kind: type[_T], document: Mapping[str, Any], path: Path, what: str) -> _T:
    """The object that `path` holds as `what`. Raises RunError where its keys are others than this version's.

    Nothing of it may be passed over: it decides, or is written again.
    """
    try:
        return kind(**document)
    except TypeError as error:
        raise RunError(
            f"{path}: not {what} of this bulkrun ({_complaint(error)}); a newer version wrote it, "
            "then use that one, or another program did"
        ) from error


def _complaint(error: TypeError) -> str:
    """Of Python's words those that speak of the object: unexpected keyword argument 'x'."""
    return str(error).partition("() ")[2].removeprefix("got an ") or str(error)


def advice_from(kind: type[_T], document: Mapping[str, Any]) -> _T | None:
    """The same for what only advises: keys that this version does not know say nothing to it.

    None where one is missing that it needs.
    """
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    try:
        return kind(**{name: value for name, value in document.items() if name in known})
    except TypeError:
        return None
