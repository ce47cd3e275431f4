"""A disk that fails, without one."""

from __future__ import annotations

from pathlib import Path


def unreadable(path: Path) -> Path:
    """Make `path` a file that opens and whose every read is an input/output error: nothing is mapped at address 0."""
    path.unlink(missing_ok=True)
    path.symlink_to("/proc/self/mem")
    return path
