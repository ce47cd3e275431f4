"""Two directories that swap their names in one step. A part of `durable`, for those that replace a whole directory."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from bulkrun.data.durable import disk_errors, fsync_dir
from bulkrun.data.new_name import renameat2

_RENAME_EXCHANGE = 2  # of linux/fs.h


def exchange_dirs(one: Path, other: Path) -> None:
    """Let two directories of one parent swap their names in one step: at no instant is either name missing.

    Raises RunError where the kernel or the file system cannot (`can_exchange` tells before).
    """
    assert one.parent == other.parent, "their names are made durable by one fsync"
    with disk_errors("exchanging it with its successor", one):
        _exchange(one, other)
        fsync_dir(one.parent)


def can_exchange(folder: Path) -> bool:
    """Whether directories in `folder` can be exchanged and files linked, tried with two that are removed again."""
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
        except OSError:
            return False
        finally:
            shutil.rmtree(probe)


def _exchange(one: Path, other: Path) -> None:
    """renameat2(2) with RENAME_EXCHANGE. Raises OSError."""
    renameat2(one, other, _RENAME_EXCHANGE)
