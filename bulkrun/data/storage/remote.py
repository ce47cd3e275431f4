"""Objects in S3 and stores like it: one connection, what a pattern means, bytes by range.

Endpoint, region and keys are those of the usual AWS environment variables and files; nothing of them is ever shown.
An object that is read is pinned to the ETag it was found with: one that changes meanwhile is an error, never a mixture.
So a request may be repeated: a store that fails for a time is asked again for some minutes.
Needs `bulkrun[s3]` (s3fs), which is loaded by the first `s3://` alone. Knows no format and no run.
"""

from __future__ import annotations

import glob
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast

from bulkrun.data.storage.patience import Patience
from bulkrun.data.storage.store_errors import STAYS, endpoint, error_code, fails_for_a_time, has_no_time, plain_errors
from bulkrun.errors import BulkrunError, InputError

if TYPE_CHECKING:
    import asyncio

    from _typeshed import WriteableBuffer

SCHEME = "s3://"
READ_AHEAD_BYTES = 8 * 2**20
_LONGEST_PAUSE_S = 20.0
_PATIENCE_S = 300.0  # as with uploads; s3fs's own patience with a request is some seconds
_T = TypeVar("_T")


def is_remote(path: str) -> bool:
    """Whether a path names an object store and not a file."""
    return path.startswith(SCHEME)


def connect(**config: Any) -> Any:
    """An s3fs file system that remembers no listings, one for each thread; `config` is botocore's.

    Raises InputError without s3fs, and for an endpoint that is no URL.
    """
    try:
        import s3fs
    except ImportError as error:
        raise InputError("s3:// paths need s3fs: pip install 's3fs>=2025.2'") from error
    endpoint()
    files = s3fs.S3FileSystem(use_listings_cache=False, config_kwargs=config)
    files.loop.set_exception_handler(_tell)
    return files


def _tell(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What asyncio says on stderr, but not when Python ends: then it is about a request that a signal broke off."""
    if not sys.is_finalizing():
        loop.default_exception_handler(context)


def patiently(request: Callable[[], _T], doing: str, url: str, passes: Callable[[BaseException], bool]) -> _T:
    """`request`, again and again while it fails with what `passes`; its errors as `plain_errors`."""

    def asked() -> _T:
        with plain_errors(doing, url):
            return request()

    return insist(asked, passes)


def insist(request: Callable[[], _T], passes: Callable[[BaseException], bool] = fails_for_a_time) -> _T:
    """`request`, again and again with growing pauses while it raises a BulkrunError whose cause `passes`.

    A pause ends at once where the handler of a signal raises, as while a command starts.
    """
    patience = Patience(_LONGEST_PAUSE_S, _PATIENCE_S)
    while True:
        try:
            return request()
        except BulkrunError as error:
            if error.__cause__ is None or not passes(error.__cause__) or patience.is_over:
                raise
        patience.pause()


@dataclass(frozen=True, slots=True)
class RemotePath:
    """One object as it was found: what `pathlib.Path` is for a file, as far as a reader needs it."""

    url: str
    size: int
    mtime_ns: int
    etag: str
    files: Any = field(repr=False, compare=False)  # the s3fs file system it was found with

    def __str__(self) -> str:
        return self.url

    def open(self, mode: str = "rb") -> BinaryIO:
        """The object's bytes, read some MiB ahead. Raises InputError here and in `read`, also when it changed."""
        assert mode == "rb", "objects are only read"
        return cast(BinaryIO, ObjectStream(self, "readahead", READ_AHEAD_BYTES))

    def check_unchanged(self) -> None:
        """Raise InputError when the object is another than the one found (for readers that do not pin it)."""
        self.check_same(self.ask("looking again", lambda: self.files.info(self.url)).get("ETag"))

    def check_same(self, etag: str | None) -> None:
        """Raise InputError when `etag`, None where there is no such object any more, is not that of the one found."""
        if etag != self.etag:
            what = "removed" if etag is None else "changed"
            raise InputError(f"{self.url}: it was {what} since the run looked at it; {STAYS}")

    def ask(self, doing: str, request: Callable[[], _T]) -> _T:
        """What `request`, about this object, brings in the end. Raises InputError and RunError as `patiently` does."""

        def asked() -> _T:
            try:
                return request()
            except FileNotFoundError as error:
                if error_code(error) == "NoSuchBucket":
                    raise
                raise InputError(f"{self.url}: it was removed since the run looked at it; {STAYS}") from error

        return patiently(asked, doing, self.url, has_no_time)

    def open_ranges(self) -> BinaryIO:
        """The object's bytes without reading ahead, for a reader that knows which ranges it wants."""
        return cast(BinaryIO, ObjectStream(self, "none", READ_AHEAD_BYTES))


class ObjectStream(io.RawIOBase):
    """A seekable stream of one version of an object."""

    def __init__(self, path: RemotePath, cache_type: str, block_size: int) -> None:
        self._path = path
        options = {"block_size": block_size, "cache_type": cache_type}
        self._file = path.ask("opening", lambda: path.files.open(path.url, "rb", **options))
        path.check_same(self._file.details.get("ETag"))  # asked for by the opening, and pinned

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        data = self._path.ask("reading", lambda: self._file.read(len(view)))
        view[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        if not self.closed and hasattr(self, "_file"):
            self._file.close()
        super().close()


def find_objects(pattern: str) -> tuple[list[RemotePath], bool]:
    """The objects that an `s3://` path means, sorted, and whether it names exactly one of them.

    An object, a directory (everything below it) or a glob (`**` included) of these. Raises InputError for no such
    bucket, no access, and a path that is none of these.
    """
    _check(pattern)
    return patiently(lambda: _found(connect(), pattern), "listing", pattern, fails_for_a_time)


def _found(files: Any, pattern: str) -> tuple[list[RemotePath], bool]:
    found = _one(files, pattern)
    if found:
        return [found], True
    listed = files.find(f"{pattern.rstrip('/')}/", detail=True)
    if not listed and glob.has_magic(pattern):
        listed = files.glob(pattern, detail=True)
        for folder in [name for name, entry in listed.items() if entry["type"] == "directory"]:
            listed |= files.find(f"{folder}/", detail=True)
    elif not listed:
        where = endpoint()
        raise InputError(f"input.path: {pattern!r} does not exist" + (f" (asked {where})" if where else ""))
    entries = sorted(listed.items())
    return [_described(files, entry) for name, entry in entries if _is_object(name, entry)], False


def _check(pattern: str) -> None:
    bucket = pattern.removeprefix(SCHEME).split("/", 1)[0]
    if "@" in bucket or ":" in bucket:
        raise InputError("input.path: credentials do not belong in an s3:// path; set AWS_ACCESS_KEY_ID... instead")
    if "?versionId=" in pattern:
        what = "names a version, and only the latest is read; copy that version to a key of its own"
        raise InputError(f"input.path: {pattern!r} {what}")
    if not bucket or glob.has_magic(bucket):
        raise InputError(f"input.path: {pattern!r} names no bucket; write s3://BUCKET/PATH")


def _one(files: Any, pattern: str) -> RemotePath | None:
    """The object of exactly this name, if there is one."""
    try:
        entry = files.info(pattern)
    except FileNotFoundError as error:
        if error_code(error) == "NoSuchBucket":
            raise
        return None
    return _described(files, entry) if _is_object(pattern, entry) else None


def _is_object(name: str, entry: dict[str, Any]) -> bool:
    return entry["type"] == "file" and not name.endswith("/")  # some tools mark folders with empty objects


def _described(files: Any, entry: dict[str, Any]) -> RemotePath:
    modified = entry["LastModified"]
    return RemotePath(
        f"{SCHEME}{entry['name']}", int(entry["size"]), int(modified.timestamp()) * 10**9, entry["ETag"], files
    )
