"""Mounting the campaigns' FUSE file systems, or saying why that cannot be done here."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def why_no_fuse() -> str | None:
    """What is missing for FUSE tests, None when they can run."""
    if importlib.util.find_spec("mfusepy") is None:
        return "needs `pip install mfusepy`"
    if shutil.which("fusermount3") is None:
        return "needs `apt-get install fuse3 libfuse2`"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "needs /dev/fuse (a container: --device /dev/fuse --cap-add SYS_ADMIN)"
    return None


@contextmanager
def mounted(module: str, mountpoint: Path, *arguments: str) -> Iterator[Path]:
    """Run a FUSE file system as a process, with its mount point made and gone afterwards."""
    mountpoint.mkdir()
    server = subprocess.Popen([sys.executable, "-m", module, *arguments], cwd=ROOT)
    try:
        deadline = time.monotonic() + 20
        while not mountpoint.is_mount():
            assert server.poll() is None and time.monotonic() < deadline, f"{module} did not mount"
            time.sleep(0.02)
        yield mountpoint
    finally:
        gc.collect()  # a failed run's traceback may hold a mapped shard, and then the server waits for it
        subprocess.run(["fusermount3", "-u", "-z", str(mountpoint)], check=False)
        server.wait(timeout=20)
        mountpoint.rmdir()
