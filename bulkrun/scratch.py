"""Folders for the files that one process needs for a while.

    with Scratch() as folder: ...

A process that is killed leaves its folder behind; whoever makes the next one in the same place removes it. Whether an
owner lives its lock tells (flock), which ends with the process however that ends: it lies beside the folder, is there
before it and goes after it. A network disk may keep the locks of its hosts apart, so names say on which machine, and in
which boot of it, a folder was made, and those of others stay.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import shutil
import socket
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from bulkrun.process_identity import boot_id

_LOCK = re.compile(r"bulkrun-scratch-(\w{8})-(\w{8})-[0-9a-f]{16}\.lock")  # machine and boot
_UNKNOWN = "_" * 8


class Scratch:
    """An empty folder that only this user may enter, below `parent` (None: the system's place for temporary files).

    It goes with everything in it when it is closed, or this object is forgotten. Raises OSError where none can be made.
    """

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        sweep(parent)
        path, lock = _new_lock(parent)
        self.path = _folder(path)
        self._finish = weakref.finalize(self, _end, path, lock)
        self.path.mkdir(mode=0o700)

    def close(self) -> None:
        """Remove the folder; may be repeated."""
        self._finish()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def sweep(parent: Path) -> None:
    """Remove the folders below `parent` that this user made on this machine and whose owners are gone."""
    here = {*_this_machine()} - {_UNKNOWN}
    locks = list[Path]()
    with suppress(OSError), os.scandir(parent) as entries:
        named = ((entry.path, _LOCK.fullmatch(entry.name)) for entry in entries)
        locks = [Path(path) for path, name in named if name and here & {*name.groups()}]
    for path in locks:
        with suppress(OSError):  # removed by another sweep, not ours to open, or in a file system without locks
            _remove_if_left(path)


def _remove_if_left(path: Path) -> None:
    lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if os.fstat(lock).st_uid == os.geteuid() and _take(lock):
            _remove(path)
    finally:
        os.close(lock)


def _new_lock(parent: Path) -> tuple[Path, int]:
    """A lock that this process holds, where the file system has locks."""
    while True:
        machine, boot = _this_machine()
        path = parent / f"bulkrun-scratch-{machine}-{boot}-{secrets.token_hex(8)}.lock"
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            if _take(lock):
                return path, lock
        except OSError:  # without locks nobody can take it either, and the folder stays if we are killed
            return path, lock
        os.close(lock)  # a sweep was there between the two steps, and removes it


def _take(lock: int) -> bool:
    """Whether the lock is ours now: nobody holds it, and nobody removed it before. Raises OSError without locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(lock).st_nlink > 0


def _end(path: Path, lock: int) -> None:
    _remove(path)
    os.close(lock)


def _remove(path: Path) -> None:
    """The folder, then its lock, which is held: while there is a folder, everybody can see whether it is needed."""
    folder = _folder(path)
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        if not os.path.lexists(folder):
            path.unlink()


def _folder(lock: Path) -> Path:
    return lock.with_suffix("")


def _this_machine() -> tuple[str, str]:
    """Its name and its boot, each as 8 characters. Containers of a machine share the boot, reboots the name."""
    return _short(socket.gethostname()), _short(boot_id())


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8] if text else _UNKNOWN
