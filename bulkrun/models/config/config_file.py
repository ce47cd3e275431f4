"""The JSON files of a model's directory: read, and broken ones named with what to do. Torch-free; knows no key."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from bulkrun.errors import ModelError
from bulkrun.models.files.read_errors import read_errors
from bulkrun.models.files.weight_files import other_format

_Config = TypeVar("_Config")


def read_config(path: Path, parse: Callable[[Mapping[str, Any]], _Config]) -> _Config:
    """What `parse` makes of `path`/config.json. Raises ModelError where there is none, or for what is wrong in it."""
    file = path / "config.json"
    raw = read_object(file)
    if raw is None:
        reason = other_format(path) or "a model directory needs a Hugging Face config.json"
        raise ModelError(f"{file}: no such file; {reason}")
    return parsed(file, raw, parse)


def read_object(file: Path) -> Mapping[str, Any] | None:
    """The object that a JSON file holds, None where there is no such file. Raises ModelError for anything else."""
    if not file.exists():
        return None
    raw = read_json(file)
    if not isinstance(raw, dict):
        raise ModelError(f"{file}: holds a {type(raw).__name__}, not an object; download it again")
    return raw


def read_json(file: Path) -> Any:
    """What a JSON file holds. Raises ModelError for one that is not there or no JSON."""
    try:
        with read_errors(file):
            return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file}: not readable as JSON ({error}); download it again") from None


def parsed(file: Path, raw: Mapping[str, Any], parse: Callable[[Mapping[str, Any]], _Config]) -> _Config:
    """What `parse` makes of the file's object. Raises ModelError, naming the file, for what is wrong in it."""
    try:
        return parse(raw)
    except KeyError as error:
        raise ModelError(f"{file}: key {error} is missing; download it again") from None
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from None
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:  # such as a text where an object is read
        raise ModelError(f"{file}: a value is of another kind than its key's ({error}); fix it") from None
