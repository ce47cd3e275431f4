"""A model's file that the disk does not give: the error names it. It is not damaged, so nothing is to be downloaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bulkrun.errors import ModelError


@contextmanager
def read_errors(file: Path) -> Iterator[None]:
    """Turn an OSError of the body, which reads `file`, into a ModelError: a read that fails names no file."""
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"{file}: cannot be read: {error.strerror or error}; check the disk and the file's permissions, then run "
            "the same command again"
        ) from error
