"""The files of an input, and how their bytes are read. Knows kinds and compression, not contents.

A path is a file, a directory (read recursively), a glob (`**` included), or a list of these: local, `s3://`, or in a
dataset of the hub (`hf://`), which is downloaded first. Inside directories and globs, names that start with `.` or `_`
are skipped, as every tool that writes datasets expects.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Literal, cast

import pyarrow as pa

from bulkrun.data.storage.hub import HubPath, fetch, is_on_hub
from bulkrun.data.storage.paths import expand, is_hidden, matches, partition_folders, user_path
from bulkrun.data.storage.remote import RemotePath, find_objects, is_remote
from bulkrun.data.types.json_types import is_unicode
from bulkrun.errors import InputError

Format = Literal["parquet", "jsonl", "csv"]
Compression = Literal["gzip", "zstd"]

FORMATS: dict[str, Format] = {
    ".parquet": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
}
COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}
WHAT_WORKS = "these work: .parquet .jsonl .ndjson .csv .tsv (all but the first also with .gz or .zst)"
_ENDINGS = [*FORMATS, *(f"{kind}{ending}" for kind in FORMATS if kind != ".parquet" for ending in COMPRESSIONS)]
_EDGE_BYTES = 64 * 2**10


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file of rows. `path` is as the user would write it; `size` in bytes and `mtime_ns` are from discovery.

    `folders` are those like lang=en/year=2024 that it was found in, below what the user spelled out. `of_commit`: its
    bytes are those of a commit, so that when they were downloaded says nothing, and `mtime_ns` is 0.
    """

    path: Path | RemotePath
    format: Format
    compression: Compression | None
    size: int
    mtime_ns: int
    folders: str = ""
    of_commit: bool = False

    def looked_at_again(self) -> InputFile:
        """The file as it is now, an object as it was found. Raises InputError when it is gone."""
        if isinstance(self.path, RemotePath):
            return self
        try:
            stat = self.path.stat()
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read any more: {error.strerror or error}") from error
        return replace(self, size=stat.st_size, mtime_ns=0 if self.of_commit else stat.st_mtime_ns)

    def fingerprint(self) -> str:
        """32 hex digits that change when the file does: its size, its mtime, and its first and last 64 KiB.

        For an object its ETag stands for its bytes; a file of a commit is a link to one that is named by its hash.
        """
        digest = hashlib.blake2b(f"{self.size} {self.mtime_ns} ".encode(), digest_size=16)
        if isinstance(self.path, RemotePath):
            digest.update(self.path.etag.encode())
            return digest.hexdigest()
        if self.of_commit:
            digest.update(self.path.resolve().name.encode())
        try:
            with self.path.open("rb") as stream:
                digest.update(stream.read(_EDGE_BYTES))
                stream.seek(max(0, self.size - _EDGE_BYTES))
                digest.update(stream.read(_EDGE_BYTES))
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read: {error.strerror or error}") from error
        return digest.hexdigest()


def find_files(paths: str | Sequence[str]) -> list[InputFile]:
    """The files that `paths` mean: in list order, sorted inside each pattern, each file once.

    Raises InputError for a pattern that matches nothing and for a file of an unknown kind.
    """
    found: dict[Path | RemotePath, InputFile] = {}
    for pattern in [paths] if isinstance(paths, str) else paths:
        if not pattern:
            raise InputError("input.path: an empty text names no file; this directory is '.'")
        files = _expand_any(pattern)
        if not files:
            raise InputError(f"input.path: nothing matches {pattern!r} (looked from {Path.cwd()}); {WHAT_WORKS}")
        for file in files:
            found.setdefault(_identity(file), file)
    if not found:
        raise InputError("input.path: the list is empty; name at least one file, directory or glob")
    return list(found.values())


def _identity(file: InputFile) -> Path | RemotePath:
    """What two names of one file have in common. Files of a commit with the same bytes are links to one, and two."""
    return file.path if file.of_commit or isinstance(file.path, RemotePath) else file.path.resolve()


def _expand_any(pattern: str) -> list[InputFile]:
    if is_remote(pattern):
        return _expand_remote(pattern)
    if is_on_hub(pattern):
        found = _expand(str(fetch(HubPath.of(pattern), _ENDINGS)))
        return [replace(file, of_commit=True).looked_at_again() for file in found]
    return _expand(pattern)


def _expand(pattern: str) -> list[InputFile]:
    spelled = user_path(pattern).parts
    found = expand(pattern, lambda path: format_of(path) is not None)
    return [_describe(path, partition_folders(path.parts, spelled)) for path in found]


def _expand_remote(pattern: str) -> list[InputFile]:
    objects, exact = find_objects(pattern)
    if exact:
        return [_describe_object(objects[0], "")]
    spelled = pattern.rstrip("/").split("/")
    found = []
    for path in objects:
        parts = path.url.split("/")
        if not is_hidden(parts, spelled) and (matches(parts, spelled) or format_of(path) is not None):
            found.append(_describe_object(path, partition_folders(parts, spelled)))
    return found


def _describe_object(path: RemotePath, folders: str) -> InputFile:
    return InputFile(path, *_kind(path, path.size), path.size, path.mtime_ns, folders)


def format_of(path: Path | RemotePath) -> tuple[Format, Compression | None] | None:
    """Format and compression by the name's endings; None for a kind that cannot be read."""
    name = PurePosixPath(str(path))
    compression = COMPRESSIONS.get(name.suffix.lower())
    format_ = FORMATS.get((name.with_suffix("") if compression else name).suffix.lower())
    if format_ is None or (compression and format_ == "parquet"):
        return None
    return format_, compression


def _describe(path: Path, folders: str) -> InputFile:
    if path.is_symlink() and not path.exists():
        raise InputError(f"{path}: a link to {path.readlink()}, which does not exist; fix the link or remove it")
    if not path.is_file():
        raise InputError(f"{path}: not a regular file (an input is read more than once, so it cannot be a pipe)")
    if not is_unicode(str(path)):
        raise InputError(f"{str(path)!a}: the name is not UTF-8, as that of an input has to be; rename it")
    stat = path.stat()
    return InputFile(path, *_kind(path, stat.st_size), stat.st_size, stat.st_mtime_ns, folders)


def _kind(path: Path | RemotePath, size: int) -> tuple[Format, Compression | None]:
    kind = format_of(path)
    if kind is None:
        suffixes = "".join(PurePosixPath(str(path)).suffixes)
        raise InputError(f"{path}: unknown kind of input file {suffixes!r}; {WHAT_WORKS}")
    if kind[1] and size == 0:
        raise InputError(f"{path}: empty, so not a {kind[1]} file: it was cut off while it was written; make it again")
    return kind


def has_tabs(file: InputFile) -> bool:
    """Whether the name of a CSV file says that tabs separate its fields."""
    name = PurePosixPath(str(file.path))
    return (name.with_suffix("") if file.compression else name).suffix.lower() == ".tsv"


@contextmanager
def open_stream(file: InputFile) -> Iterator[BinaryIO]:
    """The decompressed bytes of a text file. Raises InputError, naming the file, wherever reading them fails."""
    try:
        with file.path.open("rb") as raw:
            if file.compression == "gzip":
                yield cast(BinaryIO, gzip.GzipFile(fileobj=raw))
            elif file.compression == "zstd":
                yield cast(BinaryIO, pa.CompressedInputStream(raw, "zstd"))
            else:
                yield raw
    except (OSError, EOFError, zlib.error) as error:
        what = f"cannot be read as {file.compression}" if file.compression else "cannot be read"
        raise InputError(f"{file.path}: {what}: {error}") from error
