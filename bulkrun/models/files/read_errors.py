"""A model's file that the disk does not give: the error names it. It is not damaged, so nothing is to be downloaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bulkrun.errors import ModelError

_PIECE_BYTES = 2**24


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


def read_through(file: Path) -> None:
    """Read a file that somebody is going to map: a disk that fails under a map ends the process. Raises ModelError."""
    piece = bytearray(_PIECE_BYTES)
    with read_errors(file), file.open("rb", buffering=0) as stream:
        while stream.readinto(piece):
            pass
