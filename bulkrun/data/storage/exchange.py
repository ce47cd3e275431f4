"""A directory is copied by links and takes another's place in one step. A part of `durable`, for whole directories."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

from bulkrun.data.storage.durable import disk_errors, fsync_dir, make_dirs
from bulkrun.data.storage.new_name import NO_HARD_LINKS, renameat2

_RENAME_EXCHANGE = 2  # of linux/fs.h
_CANNOT = (*NO_HARD_LINKS, errno.EINVAL, errno.EXDEV)


def exchange_dirs(one: Path, other: Path) -> None:
    """Let two directories of one parent swap their names in one step: at no instant is either name missing.

    Raises RunError where the kernel or the file system cannot (`can_exchange` tells before).
    """
    assert one.parent == other.parent, "their names are made durable by one fsync"
    with disk_errors("exchanging it with its successor", one):
        _exchange(one, other)
        fsync_dir(one.parent)


def can_exchange(folder: Path) -> bool:
    """Whether directories in `folder` can be exchanged and files linked, tried with two that are removed again.

    Raises RunError where the disk fails.
    """
    probe = folder / f".bulkrun-probe.{secrets.token_hex(8)}"
    one, other = probe / "one", probe / "other"
    with disk_errors("trying what the file system can do", folder):
        for path in (probe, one, other):
            path.mkdir()
        try:
            (one / "file").touch()
            os.link(one / "file", one / "link")
            _exchange(one, other)
            return (other / "link").exists()
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
            return False
        finally:
            for _ in range(2):  # the first error may be the only one
                shutil.rmtree(probe, ignore_errors=True)


def _exchange(one: Path, other: Path) -> None:
    """renameat2(2) with RENAME_EXCHANGE. Raises OSError."""
    renameat2(one, other, _RENAME_EXCHANGE)


def link_tree(source: Path, target: Path, wanted: Callable[[Path], bool] = lambda path: True) -> None:
    """A durable copy of a directory tree that shares its files (hard links); `wanted` says what comes along.

    Files that are only ever replaced by rename stay as they are in the copy; what is appended to is appended to both.
    """
    make_dirs(target, stat.S_IMODE(source.stat().st_mode))
    with disk_errors("linking", target):
        for entry in filter(wanted, sorted(source.iterdir())):
            if entry.is_dir() and not entry.is_symlink():
                link_tree(entry, target / entry.name, wanted)
            else:
                os.link(entry, target / entry.name, follow_symlinks=False)
        fsync_dir(target)
