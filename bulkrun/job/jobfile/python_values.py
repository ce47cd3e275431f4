"""What a program has where a job file has YAML: paths, tuples, numbers of NumPy. Made what YAML would have given."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike, fspath
from typing import Any


def as_yaml(value: Any) -> Any:
    """The value as a job file would have it; what has no such form stays as it is, to be refused by its name."""
    if isinstance(value, Mapping):
        return {key: as_yaml(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [as_yaml(inner) for inner in value]
    if isinstance(value, PathLike):
        return fspath(value)
    is_number_or_array = hasattr(value, "dtype") and hasattr(value, "tolist")
    return value.tolist() if is_number_or_array else value
