"""The few file-system verbs that everything durable is made of, each with its fsyncs in the right places.

A file's bytes are safe after fsync(file), its name after fsync(directory). `publish_new` is the one exclusive step
of a run: link() succeeds for exactly one of any number of writers, on local disks and on NFS (`take_name` knows what
to do where there is none). Knows no runs. A failing call is a RunError that names the file, the reason, the way out; of
`read_bytes` it stays an OSError, which callers tell from a damaged file.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from bulkrun.data.storage.new_name import take_name
from bulkrun.errors import RunError

_FAILING = "the disk or network file system reports an error: check it, then run the same command again"
ADVICE = {
    errno.ENOSPC: "free some space, then run the same command again",
    errno.EDQUOT: "your disk quota is used up: free some space, then run the same command again",
    errno.EROFS: "the file system is read-only: choose another output.path or remount it",
    errno.EACCES: "check the permissions of the output directory",
    errno.EFBIG: "a file size limit (ulimit -f) is in the way",
    errno.EMFILE: "raise the limit of open files (ulimit -n), then run the same command again",
    **dict.fromkeys((errno.EIO, errno.ENXIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO), _FAILING),
}
_REMOVING_S, _LOOK_AGAIN_S = 10.0, 0.05  # a process that is about to stop may still put a file in, or have one open
_TAIL_BYTES = 8192  # holds the nonce of a JSON document and of a Parquet footer


@contextmanager
def disk_errors(
    doing: str, path: Path, otherwise: str = "nothing that was finished is lost; run the same command again"
) -> Iterator[None]:
    """Turn an OSError of the body into a RunError: what was being done, to which file, why not, what to do.

    `otherwise` is what to do where the error itself does not tell.
    """
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        advice = ADVICE.get(error.errno or 0, otherwise)
        raise RunError(f"{path}: {doing} failed: {reason}; {advice}") from error


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an OSError of the body the file's name: one of a file that is open already (a read) has none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def fsync_dir(path: Path) -> None:
    """Make the names in a directory survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems without it keep names in their own way
            raise
    finally:
        os.close(fd)


def make_dirs(path: Path, mode: int = 0o777) -> None:
    """Create a directory and its missing parents, durably; `mode` is that of the last one.

    Where a link leads nowhere, the directory is made that it names.
    """
    if path.is_dir():
        return
    with disk_errors("creating the directory", path, otherwise="choose another output.path"):
        _make_dirs(path.resolve(), mode)


def _make_dirs(path: Path, mode: int) -> None:
    if not path.parent.is_dir():
        _make_dirs(path.parent, 0o777)
    path.mkdir(mode=mode, exist_ok=True)
    fsync_dir(path.parent)


def write_file(path: Path, data: bytes) -> None:
    """Write a whole new file and fsync it (its name is not durable yet: publish or rename it)."""
    with disk_errors("writing", path):
        try:
            with path.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            discard(path)  # on a full disk half a file takes space
            raise


@contextmanager
def new_file(path: Path, shown: Path | None = None) -> Iterator[IO[bytes]]:
    """A new file to be written bit by bit: fsynced at the end, removed when the body fails. Then `swap_in` names it.

    The body's own writes raise OSError as they are; other errors name the file as it is `shown` to the user.
    """
    with disk_errors("creating", shown or path):
        file = path.open("xb")
    try:
        yield file
        with disk_errors("writing", shown or path):
            file.flush()
            os.fsync(file.fileno())
            file.close()
    except BaseException:
        with suppress(OSError):  # closing writes what is left once more: its error would take the place of the first
            file.close()
        discard(path)
        raise


def discard(path: Path) -> None:
    """Remove a file that is wanted no more, as far as one may: the error that made it so is the one to tell."""
    with suppress(OSError):
        path.unlink(missing_ok=True)


def publish_new(tmp: Path, final: Path) -> bool:
    """Give a finished, fsynced, uniquely named file its final name if nobody has it yet.

    Returns whether the file under the final name is ours; `tmp` is gone afterwards. Content decides (the file must
    carry a nonce near its end), not the reply: a network file system may lose the reply of a link() that was done.
    Raises RunError when it cannot be known, or when the file system has no exclusive step (a run's first file is
    published before any work).
    """
    with disk_errors("publishing", final):
        if not (mine := _own_tail(tmp, final)):
            return False
        _name_if_absent(tmp, final)
        ours = _tail(final) == mine
        fsync_dir(final.parent)
        tmp.unlink(missing_ok=True)
        return ours


def swap_in(tmp: Path, final: Path) -> None:
    """Put a finished, fsynced file in the place of the one named `final`: readers see the old one or the new one."""
    with disk_errors("replacing", final):
        tmp.replace(final)
        fsync_dir(final.parent)


def rename_dir(source: Path, target: Path) -> None:
    """Rename a directory; `target` is an unused name beside it (one fsync makes both durable)."""
    with disk_errors("moving it aside", source):
        source.rename(target)
        fsync_dir(target.parent)


def remove_tree(path: Path) -> None:
    """Remove a directory and what is in it; what another process removed meanwhile is fine. May be repeated.

    Raises RunError where something stays: NFS keeps a removed file, under another name, while a program has it open.
    """
    give_up = time.monotonic() + _REMOVING_S
    with disk_errors("removing", path):
        while path.is_dir():
            shutil.rmtree(path, onerror=_unless_gone)
            if path.is_dir() and time.monotonic() >= give_up:
                raise RunError(f"{path}: cannot be removed: a program has a file in it open; end it and run this again")
            time.sleep(_LOOK_AGAIN_S if path.is_dir() else 0)
        if path.parent.is_dir():
            fsync_dir(path.parent)


def _unless_gone(_function: object, _path: str, failure: tuple[Any, BaseException, Any]) -> None:
    if not (isinstance(failure[1], OSError) and failure[1].errno in (errno.ENOENT, errno.ENOTEMPTY)):
        raise failure[1]


def _name_if_absent(tmp: Path, final: Path) -> None:
    try:
        take_name(tmp, final)
    except FileExistsError:
        return
    except OSError as error:
        if final.exists():  # done (the reply was lost), or somebody else was first: the content tells
            return
        if error.errno == errno.ENOTSUP:
            raise RunError(
                f"{final.parent}: this file system has neither hard links nor exclusive renames, and results are "
                "published with one of them; choose an output.path on another one"
            ) from error
        raise


def _own_tail(tmp: Path, final: Path) -> tuple[int, bytes] | None:
    try:
        return _tail(tmp)
    except FileNotFoundError:  # another worker finished the run meanwhile, and its clean-up removed our late tmp
        if not final.exists():
            raise
        return None


def _tail(path: Path) -> tuple[int, bytes]:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        return size, file.read()


def temporary(path: Path) -> Path:
    """A unique name beside `path` that no reader's glob matches."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


def write_new_json(path: Path, document: dict[str, Any]) -> bool:
    """Create a JSON file if there is none. Returns whether the file is now ours (see `publish_new`).

    Two writers of equal documents both own it: put a nonce in where that matters.
    """
    tmp = temporary(path)
    write_file(tmp, encode_json(document))
    try:
        return publish_new(tmp, path)
    except RunError:
        discard(tmp)
        raise


def replace_json(path: Path, document: dict[str, Any], *, sync: bool = True) -> None:
    """Replace a JSON file atomically. `sync=False` is for what may be lost in a power cut (heartbeats)."""
    tmp = temporary(path)
    if sync:
        write_file(tmp, encode_json(document))
    with disk_errors("writing", path):
        try:
            if not sync:
                tmp.write_bytes(encode_json(document))
            tmp.replace(path)
        except OSError:
            discard(tmp)
            raise
        if sync:
            fsync_dir(path.parent)


def read_bytes(path: Path) -> bytes:
    """What is in a file. Raises OSError with the file's name."""
    with naming(path):
        return path.read_bytes()


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, None when there is no such file.

    Raises RunError when it does not read as one, OSError with the file's name when the disk fails.
    """
    try:
        document = json.loads(read_bytes(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise RunError(f"{path}: not a whole JSON file ({error}); the disk or another program damaged it") from error
    if not isinstance(document, dict):
        raise RunError(f"{path}: holds {type(document).__name__}, not a JSON object; another program wrote it")
    return document


def encode_json(document: dict[str, Any]) -> bytes:
    """A JSON object as the bytes of a file."""
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def append_line(path: Path, line: bytes) -> None:
    """Append one line, with one write where the disk has room for it, to a file that several processes may append to.

    A line that a full disk or a crash tore is ended first: it costs nobody the next one. One that another writer is at
    just then may look torn, so that an empty line may stand between two.
    """
    with disk_errors("appending", path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            size = os.fstat(fd).st_size
            left = (b"\n" if size and os.pread(fd, 1, size - 1) != b"\n" else b"") + line + b"\n"
            while left:  # a short write is no error: only the next one says what was in the way
                left = left[os.write(fd, left) :]
        finally:
            os.close(fd)
