"""A file system in memory that knows what is durable and saves what a power cut would leave after every operation.

    python -m tests.campaigns.powercut_fs MOUNTPOINT SNAPSHOTS [--max-ops N]
    (needs /dev/fuse, apt packages fuse3 and libfuse2, and mfusepy from PyPI)

The model is strict POSIX: a file's bytes are durable after fsync(file), names after fsync(directory). What was not
synced may be lost or kept, so each cut is saved in three variants: `min` (only what was synced), `max`
(everything) and `rand` (a random prefix of each file's and directory's unsynced changes).

Operations count from the moment on in which `/ack` is made. Creating `/ack/NAME` marks a promise; SNAPSHOTS/acks lists
`operation name`.
"""

from __future__ import annotations

import argparse
import errno
import random
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mfusepy as fuse

VARIANTS = ("min", "max", "rand")


@dataclass
class File:
    """`live` is what programs see, `synced` what is durable, `pending` the writes (offset, bytes) between them.

    A pending write of None cuts or extends the file to the offset.
    """

    mode: int
    live: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)
    nlink: int = 1
    born: int = field(default_factory=time.time_ns)

    def change(self, offset: int, data: bytes | None) -> None:
        self.pending.append((offset, data))
        apply_write(self.live, offset, data)

    def sync(self) -> None:
        self.synced, self.pending = bytes(self.live), []

    def after_cut(self, kept: int) -> bytes:
        content = bytearray(self.synced)
        for offset, data in self.pending[:kept]:
            apply_write(content, offset, data)
        return bytes(content)


@dataclass
class Folder:
    """The same for a directory: names to inode numbers; a pending change to None is a removal."""

    mode: int
    live: dict[str, int] = field(default_factory=dict)
    synced: dict[str, int] = field(default_factory=dict)
    pending: list[tuple[str, int | None]] = field(default_factory=list)
    nlink: int = 1
    born: int = field(default_factory=time.time_ns)

    def change(self, name: str, inode: int | None) -> None:
        self.pending.append((name, inode))
        apply_name(self.live, name, inode)

    def sync(self) -> None:
        self.synced, self.pending = dict(self.live), []

    def after_cut(self, kept: int) -> dict[str, int]:
        names = dict(self.synced)
        for name, inode in self.pending[:kept]:
            apply_name(names, name, inode)
        return names


def apply_write(content: bytearray, offset: int, data: bytes | None) -> None:
    if data is None:
        del content[offset:]
    content.extend(bytes(max(0, offset - len(content))))
    if data is not None:
        content[offset : offset + len(data)] = data


def apply_name(names: dict[str, int], name: str, inode: int | None) -> None:
    if inode is None:
        names.pop(name, None)
    else:
        names[name] = inode


class PowerCutFS(fuse.Operations):
    """The FUSE operations; every one that changes something is followed by a snapshot."""

    use_ns = True

    def __init__(self, snapshots: Path, max_ops: int) -> None:
        snapshots.mkdir(parents=True)
        self._snapshots, self._max_ops, self._ops = snapshots, max_ops, 0
        self._inodes: dict[int, Any] = {1: Folder(stat.S_IFDIR | 0o755)}
        self._counts = False
        self._random = random.Random(0)
        self._log = (snapshots / "ops").open("w", buffering=1)
        self._acks = (snapshots / "acks").open("w", buffering=1)

    def _find(self, path: str) -> int:
        inode = 1
        for name in filter(None, path.split("/")):
            node = self._inodes[inode]
            if not isinstance(node, Folder) or name not in node.live:
                raise fuse.FuseOSError(errno.ENOENT)
            inode = node.live[name]
        return inode

    def _node(self, path: str) -> Any:
        return self._inodes[self._find(path)]

    def _name(self, path: str, inode: int | None) -> None:
        folder, _, name = path.rpartition("/")
        self._node(folder).change(name, inode)

    def _add(self, path: str, node: File | Folder) -> int:
        inode = max(self._inodes) + 1
        self._inodes[inode] = node
        self._name(path, inode)
        return inode

    def _done(self, operation: str, path: str) -> None:
        self._counts |= path == "/ack"
        if not self._counts:
            return
        self._ops += 1
        self._log.write(f"{self._ops} {operation} {path}\n")
        if operation == "create" and path.startswith("/ack/"):
            self._acks.write(f"{self._ops} {path[5:]}\n")
        if self._ops <= self._max_ops:
            for variant in VARIANTS:
                self._save(1, self._snapshots / f"{self._ops:05d}-{variant}", variant)

    def _save(self, inode: int, to: Path, variant: str) -> None:
        node = self._inodes[inode]
        most = len(node.pending)
        left = node.after_cut({"min": 0, "max": most}.get(variant, self._random.randint(0, most)))
        if isinstance(node, File):
            to.write_bytes(left)
            return
        to.mkdir()
        for name, child in left.items():
            self._save(child, to / name, variant)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        inode = self._find(path)
        node = self._inodes[inode]
        size = len(node.live) if isinstance(node, File) else 0
        times = dict.fromkeys(("st_atime", "st_mtime", "st_ctime"), node.born)
        owner = {"st_uid": 0, "st_gid": 0, "st_ino": inode}
        return {"st_mode": node.mode, "st_nlink": node.nlink, "st_size": size} | times | owner

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *self._node(path).live]

    def mkdir(self, path: str, mode: int) -> None:
        self._add(path, Folder(stat.S_IFDIR | mode))
        self._done("mkdir", path)

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        inode = self._add(path, File(stat.S_IFREG | mode))
        self._done("create", path)
        return inode

    def open(self, path: str, flags: int) -> int:
        return self._find(path)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return bytes(self._inodes[fh].live[offset : offset + size])

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self._inodes[fh].change(offset, bytes(data))
        self._done("write", path)
        return len(data)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        self._node(path).change(length, None)
        self._done("truncate", path)

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self._inodes[fh].sync()
        self._done("fsync", path)
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        self._node(path).sync()
        self._done("fsyncdir", path)
        return 0

    def unlink(self, path: str) -> None:
        self._node(path).nlink -= 1
        self._name(path, None)
        self._done("unlink", path)

    rmdir = unlink

    def rename(self, old: str, new: str, flags: int = 0) -> None:
        inode = self._find(old)
        self._name(old, None)
        self._name(new, inode)
        self._done("rename", new)

    def link(self, target: str, source: str) -> None:
        inode = self._find(source)
        folder, _, name = target.rpartition("/")
        if name in self._node(folder).live:
            raise fuse.FuseOSError(errno.EEXIST)
        self._inodes[inode].nlink += 1
        self._name(target, inode)
        self._done("link", target)

    def flush(self, path: str, fh: int) -> int:
        return 0

    def release(self, path: str, fh: int) -> int:
        return 0

    def opendir(self, path: str) -> int:
        return 0

    def releasedir(self, path: str, fh: int) -> int:
        return 0

    def chmod(self, path: str, mode: int) -> None:
        self._node(path).mode = mode

    def utimens(self, path: str, times: Any = None) -> None:
        return None

    def statfs(self, path: str) -> dict[str, int]:
        blocks = dict.fromkeys(("f_blocks", "f_bfree", "f_bavail"), 1 << 20)
        return {"f_bsize": 4096, "f_frsize": 4096, "f_namemax": 255} | blocks


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("mountpoint")
    parser.add_argument("snapshots", type=Path)
    parser.add_argument("--max-ops", type=int, default=2000)
    given = parser.parse_args()
    operations = PowerCutFS(given.snapshots, given.max_ops)
    fuse.FUSE(operations, given.mountpoint, foreground=True, nothreads=True, attr_timeout=0, entry_timeout=0)
