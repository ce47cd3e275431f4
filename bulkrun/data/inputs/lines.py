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


def read_lines(stream: BinaryIO, max_bytes: int) -> Iterator[Line]:
    """The lines of `stream`, never holding more than `max_bytes` and a chunk."""
    chunk = stream.read(CHUNK_BYTES)
    number, offset = 0, len(_BOM) if chunk.startswith(_BOM) else 0
    pending = _Pending(max_bytes)
    for piece in chain([chunk[offset:]], iter(lambda: stream.read(CHUNK_BYTES), b"")):
        first, *others = piece.split(b"\n")
        pending.add(first)
        for following in others:
            size = pending.size
            number += 1
            yield Line(number, offset, pending.take())
            offset += size + 1
            pending.add(following)
    if pending.size:
        yield Line(number + 1, offset, pending.take())


def is_blank(line: Line) -> bool:
    """Whether a line has nothing but white space: then it is not a row, wherever it is."""
    return line.data is not None and not line.data.strip()


def filled_lines(stream: BinaryIO, max_bytes: int) -> Iterator[Line]:
    """The lines of `stream` that are not blank, with their numbers among all lines."""
    return (line for line in read_lines(stream, max_bytes) if not is_blank(line))
