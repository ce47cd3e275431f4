"""Giving a file a name that nobody has, in one exclusive step. A part of `durable`; knows no contents and no fsync.

link(2) is that step wherever there are hard links, on one machine and over NFS. Where there are none (exFAT, many FUSE
and SMB mounts), renameat2(2) with RENAME_NOREPLACE is one too: it moves the file or finds the name taken, so that a
kill leaves the file under the old name or under the new one. On a network mount the server may not be asked whether
the name is taken; then of two machines' files the later one stands, whole, which is as good where either would do.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_AT_FDCWD, _RENAME_NOREPLACE = -100, 1  # of linux/fcntl.h and linux/fs.h


def take_name(source: Path, target: Path) -> None:
    """Name the file `source` also (or from now on only) `target`.

    Raises FileExistsError where that name is taken, OSError with ENOTSUP where neither step exists, and others.
    """
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in NO_HARD_LINKS:
            raise
        _rename_if_absent(source, target)


def _rename_if_absent(source: Path, target: Path) -> None:
    try:
        renameat2(source, target, _RENAME_NOREPLACE)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOSYS):  # the file system, or the kernel, does not know the flag
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP), str(target)) from error
        raise


def renameat2(source: Path, target: Path, flags: int) -> None:
    """The system call, which Python has no name for. Raises OSError; ENOSYS where there is none."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:  # not Linux, or a C library older than 2018
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(source), None, str(target))
