"""Objects in S3 and stores like it: one connection, what a pattern means, bytes by range, errors in plain words.

Endpoint, region and keys are those of the usual AWS environment variables and files; nothing of them is ever shown.
An object that is read is pinned to the ETag it was found with: one that changes meanwhile is an error, never a mixture.
So a request may be repeated: a store that fails for a time is asked again for some minutes.
Needs `bulkrun[s3]` (s3fs), which is loaded by the first `s3://` alone. Knows no format and no run.
"""

from __future__ import annotations

import glob
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast
from urllib.parse import urlsplit

from bulkrun.data.patience import Patience
from bulkrun.errors import BulkrunError, InputError, RunError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

SCHEME = "s3://"
READ_AHEAD_BYTES = 8 * 2**20
_LONGEST_PAUSE_S = 20.0
_PATIENCE_S = 300.0  # as with uploads; s3fs's own patience with a request is some seconds
_STAY = "give the run an input that does not change"
_T = TypeVar("_T")
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


def is_remote(path: str) -> bool:
    """Whether a path names an object store and not a file."""
    return path.startswith(SCHEME)


def connect() -> Any:
    """An s3fs file system that remembers no listings, one for each thread. Raises InputError without s3fs."""
    try:
        import s3fs
    except ImportError as error:
        raise InputError("s3:// paths need s3fs: pip install 's3fs>=2025.2'") from error
    return s3fs.S3FileSystem(use_listings_cache=False)


def endpoint() -> str:
    """Which store is asked, without any user or password in it; "" is Amazon's own."""
    url = urlsplit(next((os.environ[name] for name in _ENDPOINT_VARIABLES if os.environ.get(name)), ""))
    port = f":{url.port}" if url.port else ""
    return f"{url.scheme}://{url.hostname}{port}" if url.hostname else ""


@contextmanager
def plain_errors(doing: str, url: str, kind: type[BulkrunError] = InputError) -> Iterator[None]:
    """Turn what s3fs and its libraries raise into one line: the object, what failed, why, what to do.

    Raises RunError in place of `kind` where the store had no time: nothing that the user gave is wrong then.
    """
    from botocore.exceptions import BotoCoreError

    try:
        yield
    except (OSError, BotoCoreError) as error:
        raise (RunError if overloaded(error) else kind)(f"{url}: {doing} failed: {reason(error)}") from error


def patiently(request: Callable[[], _T], doing: str, url: str, passes: Callable[[BaseException], bool]) -> _T:
    """`request`, again and again with growing pauses while it fails with what `passes`; its errors as `plain_errors`.

    A pause ends at once where the handler of a signal raises, as while a command starts.
    """
    patience = Patience(_LONGEST_PAUSE_S, _PATIENCE_S)
    while True:
        try:
            with plain_errors(doing, url):
                return request()
        except BulkrunError as error:
            if error.__cause__ is None or not passes(error.__cause__) or patience.is_over:
                raise
        patience.pause()


def reason(error: BaseException) -> str:
    """Why a request failed and what to do. Made of codes and names alone: a server's words may hold a key."""
    code, name = error_code(error), type(error).__name__
    where = endpoint() or "the store"
    if code == "NoSuchBucket":
        return f"there is no such bucket in {where}; check its name, and AWS_ENDPOINT_URL"
    if code in ("PreconditionFailed", "412") or name == "FileExpired":
        return f"it was changed or removed since the run looked at it; {_STAY}"
    if isinstance(error, FileNotFoundError):
        return "there is no such object; check the path"
    if isinstance(error, PermissionError):
        return f"{where} refuses ({code or 'access denied'}); check the keys (AWS_ACCESS_KEY_ID...) and their policy"
    if name in ("NoCredentialsError", "PartialCredentialsError"):
        return "no keys were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    if not_reached(error):
        return f"{where} does not answer; check AWS_ENDPOINT_URL and the network"
    return f"{code or name}; run the same command again"


def not_reached(error: BaseException) -> bool:
    """Whether a request got no answer at all."""
    return bool(
        {"HTTPClientError", "ConnectionError", "TimeoutError"} & {kind.__name__ for kind in type(error).__mro__}
    )


def error_code(error: BaseException) -> str | None:
    """The store's own code of a failed request (`NoSuchBucket`, `SlowDown`...), if it sent one."""
    response = _response(error)
    return response["Error"].get("Code") if response else None


def overloaded(error: BaseException) -> bool:
    """Whether the store said that it cannot answer just now: HTTP's 429 and 5xx, but for 501, which it never can."""
    status = int((_response(error) or {}).get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    return status == 429 or (status >= 500 and status != 501)


def has_no_time(error: BaseException) -> bool:
    """Whether the same request to a store that answered before may well succeed later."""
    return overloaded(error) or not_reached(error)


def _response(error: BaseException) -> dict[str, Any] | None:
    return getattr(error, "response", None) or getattr(error.__cause__, "response", None)


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
            raise InputError(f"{self.url}: it was {what} since the run looked at it; {_STAY}")

    def ask(self, doing: str, request: Callable[[], _T]) -> _T:
        """What `request`, about this object, brings in the end. Raises InputError and RunError as `patiently` does."""

        def asked() -> _T:
            try:
                return request()
            except FileNotFoundError as error:
                if error_code(error) == "NoSuchBucket":
                    raise
                raise InputError(f"{self.url}: it was removed since the run looked at it; {_STAY}") from error

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
    return patiently(lambda: _found(connect(), pattern), "listing", pattern, overloaded)


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
