"""Finished rows of an open shard on disk: append-only, one checksummed record a line.

    crc32-of-the-JSON in 8 hex digits, a space, the JSON, a newline

A row is done if and only if a record of it reads back with a good checksum. A record covers one generation and all
the rows it answers, so rows that share a prompt become done at one instant. A torn tail (power cut, full disk) is
what a crash leaves; a bad line in the middle is damage: both cost the rows they hold, never a wrong row. Knows
nothing of tokens, tensors or Parquet.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import IO, Any

from bulkrun.data.storage.documents import from_document
from bulkrun.data.storage.durable import disk_errors, fsync_dir, read_bytes
from bulkrun.errors import RunError


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """The outcome of one generation.

    A row that failed has an `error_code`, and a `response` only if some text came before the failure. `extra` holds
    the values of the columns that the job asks for beyond the usual ones, by column name, as JSON knows them.
    """

    rows: tuple[int, ...]
    sample: int
    response: str | None = None
    finish_reason: str = "error"
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error_code: str | None = None
    error_message: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    cached_tokens: int = 0  # prompt tokens that the prefix cache held


@dataclass(frozen=True, slots=True)
class PartialRecord:
    """Output tokens so far of a generation: the longest such record counts, and none once there is a JournalRecord."""

    rows: tuple[int, ...]
    sample: int
    token_ids: tuple[int, ...]


@dataclass
class JournalContents:
    """What a journal says. `damaged` are line numbers (from 1) whose checksum is wrong, the torn tail not counted."""

    records: list[JournalRecord] = field(default_factory=list)
    partials: list[PartialRecord] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)


class JournalGone(RunError):
    """A journal's file has lost its name: its shard was committed by another worker, or the run was moved aside."""


class JournalWriter:
    """Appends records of one shard and one attempt. `append` survives kill -9, `sync` survives a power cut.

    `release` gives the descriptor back until it is needed again; what was appended before is synced all the same.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        with disk_errors("creating the journal", path):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        self._named = False  # whether the file's name is durable
        self._dirty = False
        self._torn = False  # whether a failed write may have left half a line

    @property
    def dirty(self) -> bool:
        """Whether something was appended since the last sync."""
        return self._dirty

    def append(self, records: Iterable[JournalRecord | PartialRecord]) -> None:
        """Hand whole lines to the operating system. Raises RunError (disk full, read-only, ...), JournalGone."""
        data = b"".join(map(encode_record, records))
        with disk_errors("appending to the journal", self._path):
            descriptor = self._opened()
            view = memoryview(b"\n" + data if self._torn else data)
            self._torn = self._dirty = True
            while view:
                view = view[os.write(descriptor, view) :]
        self._torn = False

    def sync(self) -> None:
        """Make what was appended survive a power cut, through whichever descriptors. Raises RunError, JournalGone."""
        if not self._dirty:
            return
        with disk_errors("syncing the journal", self._path):
            os.fsync(self._opened())
            if not self._named:
                fsync_dir(self._path.parent)
                self._named = True
        self._dirty = False

    def release(self) -> None:
        """Close the descriptor. A network file system may tell only now that a write failed: raises RunError."""
        file, self._file = self._file, None
        if file is not None:
            with disk_errors("closing the journal", self._path):
                file.close()

    def _opened(self) -> int:
        """The file's descriptor. Never makes the file anew: another run may be in this one's place by now."""
        if self._file is None:
            try:
                descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)
            except FileNotFoundError:
                raise JournalGone(f"{self._path}: removed while it was in use; run the same command again") from None
            # A file object closes itself with its last reference: a failing disk may leave nobody to call `release`.
            self._file = os.fdopen(descriptor, "ab", buffering=0)
        return self._file.fileno()


def encode_record(record: JournalRecord | PartialRecord) -> bytes:
    """The line of a record, newline included."""
    # Not `asdict`: it would copy every token's log-probability.
    values = ((field.name, getattr(record, field.name)) for field in fields(record))
    document = {key: value for key, value in values if value is not None and value != {}}
    if isinstance(record, PartialRecord):
        document["partial"] = True
    payload = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return b"%08x %b\n" % (zlib.crc32(payload), payload)


def read_journal(path: Path) -> JournalContents:
    """All good records of a journal, in order; none when there is no such file."""
    contents = JournalContents()
    try:
        data = read_bytes(path)
    except FileNotFoundError:
        return contents
    lines = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        document = _decode_line(line)
        if document is None:
            if line and number < len(lines):
                contents.damaged.append(number)
        elif document.pop("partial", False):
            contents.partials.append(from_document(PartialRecord, document, path, "a journal"))
        else:
            contents.records.append(from_document(JournalRecord, document, path, "a journal"))
    return contents


def _decode_line(line: bytes) -> dict[str, Any] | None:
    payload = line[9:]
    if line[:9] != b"%08x " % zlib.crc32(payload):
        return None
    document: dict[str, Any] = json.loads(payload.decode("utf-8", "surrogatepass"))
    for key in ("rows", "token_ids"):
        if key in document:
            document[key] = tuple(document[key])
    return document


@dataclass
class ShardOutcomes:
    """What all attempts together know of a shard: the first good record of each (row, sample) wins."""

    answered: dict[tuple[int, int], JournalRecord] = field(default_factory=dict)
    partials: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    damaged: dict[str, list[int]] = field(default_factory=dict)


def read_outcomes(paths: Sequence[Path]) -> ShardOutcomes:
    """Merge a shard's journals. Of several partial outputs of a generation the longest is kept."""
    outcomes = ShardOutcomes()
    for path in paths:
        contents = read_journal(path)
        if contents.damaged:
            outcomes.damaged[path.name] = contents.damaged
        for record in contents.records:
            for row in record.rows:
                outcomes.answered.setdefault((row, record.sample), record)
        for partial in contents.partials:
            for row in partial.rows:
                known = outcomes.partials.get((row, partial.sample), ())
                outcomes.partials[row, partial.sample] = max(known, partial.token_ids, key=len)
    return outcomes
