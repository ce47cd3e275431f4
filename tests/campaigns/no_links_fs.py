"""A pass-through file system without hard links.

python -m tests.campaigns.no_links_fs ROOT MOUNTPOINT
(needs /dev/fuse, apt packages fuse3 and libfuse2, and mfusepy from PyPI)
"""

from __future__ import annotations

import errno
import sys
from pathlib import Path

import mfusepy as fuse

from tests.campaigns.fault_fs import FaultFS


class NoLinksFS(FaultFS):
    """link(2) fails as it does on exFAT and on many network mounts."""

    def link(self, target: str, source: str) -> None:
        raise fuse.FuseOSError(errno.EPERM)


if __name__ == "__main__":
    root, mountpoint = Path(sys.argv[1]), sys.argv[2]
    fuse.FUSE(NoLinksFS(root), mountpoint, foreground=True, nothreads=True, attr_timeout=0, entry_timeout=0)
