"""A pass-through file system that fails one chosen operation.

    python -m tests.campaigns.fault_fs ROOT MOUNTPOINT
    (needs /dev/fuse, apt packages fuse3 and libfuse2, and mfusepy from PyPI)

`ROOT.rule` holds `N ERRNO WHEN`: operation N (counted from 1 over all that change something) fails with that error,
`before` it is done or `after` (done, but the reply is lost); `sticky` fails N and everything after it that needs
space, of EROFS everything. `ROOT.log` lists the operations. Rereads the rule at each operation.
"""

# A file system is made of os calls.
# ruff: noqa: PTH101, PTH102, PTH104, PTH106, PTH108, PTH208

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mfusepy as fuse

_NEEDS_SPACE = ("create", "write", "mkdir", "link")


class FaultFS(fuse.Operations):
    """The FUSE operations over a real directory."""

    use_ns = True

    def __init__(self, root: Path) -> None:
        self._root, self._count, self._lock = root, 0, threading.Lock()
        self._rule = root.with_name(f"{root.name}.rule")
        self._log = root.with_name(f"{root.name}.log").open("a", buffering=1)

    def _real(self, path: str) -> str:
        return f"{self._root}/{path.lstrip('/')}"

    def _faulty(self, operation: str, path: str, do: Callable[[], Any]) -> Any:
        with self._lock:
            self._count += 1
            number = self._count
            self._log.write(f"{number} {operation} {path}\n")
        at, name, when = (self._rule.read_text().split() if self._rule.exists() else ["0", "EIO", "before"])[:3]
        concerned = name == "EROFS" or operation in _NEEDS_SPACE
        hit = number >= int(at) > 0 and concerned if when == "sticky" else number == int(at)
        if hit and when != "after":
            raise fuse.FuseOSError(getattr(errno, name))
        result = do()
        if hit:
            raise fuse.FuseOSError(getattr(errno, name))
        return result

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        found = os.lstat(self._real(path))
        plain = {key: getattr(found, key) for key in ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid", "st_ino")}
        return plain | {key: getattr(found, f"{key}_ns") for key in ("st_atime", "st_mtime", "st_ctime")}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._real(path))]

    def open(self, path: str, flags: int) -> int:
        return os.open(self._real(path), flags & ~os.O_APPEND)

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        do = lambda: os.open(self._real(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)  # noqa: E731
        return int(self._faulty("create", path, do))

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return int(self._faulty("write", path, lambda: os.pwrite(fh, data, offset)))

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        self._faulty("truncate", path, lambda: os.truncate(self._real(path), length))

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self._faulty("fsync", path, lambda: os.fsync(fh))
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        self._faulty("fsyncdir", path, lambda: None)
        return 0

    def flush(self, path: str, fh: int) -> int:
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def unlink(self, path: str) -> None:
        self._faulty("unlink", path, lambda: os.unlink(self._real(path)))

    def mkdir(self, path: str, mode: int) -> None:
        self._faulty("mkdir", path, lambda: os.mkdir(self._real(path), mode))

    def rmdir(self, path: str) -> None:
        os.rmdir(self._real(path))

    def rename(self, old: str, new: str, flags: int = 0) -> None:
        self._faulty("rename", new, lambda: os.rename(self._real(old), self._real(new)))

    def link(self, target: str, source: str) -> None:
        self._faulty("link", target, lambda: os.link(self._real(source), self._real(target)))

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(self._real(path), mode)

    def utimens(self, path: str, times: Any = None) -> None:
        os.utime(self._real(path), ns=times or None)

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._real(path))
        keys = ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_files", "f_ffree", "f_frsize", "f_namemax")
        return {key: getattr(found, key) for key in keys}


if __name__ == "__main__":
    fuse.FUSE(FaultFS(Path(sys.argv[1])), sys.argv[2], foreground=True, nothreads=True, attr_timeout=0, entry_timeout=0)
