"""Lines of a byte stream, numbered, in bounded memory. Knows no text format.

Every newline ends exactly one line; only what follows the final newline does not start another when it is empty.
A byte order mark is dropped. Carriage returns stay: what they mean is the format's business.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import BinaryIO, NamedTuple

CHUNK_BYTES = 256 * 2**10
_BOM = b"\xef\xbb\xbf"


class Line(NamedTuple):
    """One line. `number` counts from 1, `offset` is its first byte in the stream, `data` has no newline.

    `data` is None for a line of more bytes than allowed, which was read past without being held.
    """

    number: int
    offset: int
    data: bytes | None


class _Pending:
    """The start of a line whose newline has not been read yet."""

    def __init__(self, max_bytes: int) -> None:
        self.pieces: list[bytes] = []
        self.size = 0
        self.max_bytes = max_bytes

    def add(self, piece: bytes) -> None:
        self.size += len(piece)
        if self.size > self.max_bytes:
            self.pieces.clear()
        else:
            self.pieces.append(piece)

    def take(self) -> bytes | None:
        data = None if self.size > self.max_bytes else b"".join(self.pieces)
        self.pieces, self.size = [], 0
        return data


def read_lines(stream: BinaryIO, max_bytes: int, skip: int = 0) -> Iterator[Line]:
    """The lines of `stream` after the first `skip`, never holding more than `max_bytes` and a chunk."""
    number, offset, first_chunk = _skip_lines(stream, skip)
    pending = _Pending(max_bytes)
    for chunk in chain([first_chunk], iter(lambda: stream.read(CHUNK_BYTES), b"")):
        first, *others = chunk.split(b"\n")
        pending.add(first)
        for following in others:
            size = pending.size
            number += 1
            yield Line(number, offset, pending.take())
            offset += size + 1
            pending.add(following)
    if pending.size:
        yield Line(number + 1, offset, pending.take())


def _skip_lines(stream: BinaryIO, skip: int) -> tuple[int, int, bytes]:
    """Read past `skip` lines: the lines skipped, the byte where the next one starts, and what was read of it."""
    chunk = stream.read(CHUNK_BYTES)
    number, offset = 0, len(_BOM) if chunk.startswith(_BOM) else 0
    chunk = chunk[offset:]
    while chunk and number + (newlines := chunk.count(b"\n")) < skip:
        number += newlines
        offset += len(chunk)
        chunk = stream.read(CHUNK_BYTES)
    start = 0
    while chunk and number < skip:
        start = chunk.index(b"\n", start) + 1
        number += 1
    return number, offset + start, chunk[start:]
