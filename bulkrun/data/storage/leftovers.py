"""What killed processes left behind under names that nobody asks for again."""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from pathlib import Path

TEMPORARIES = f".*.{'[0-9a-f]' * 16}.tmp"  # the names of `durable.temporary`
_OLD_S = 24 * 3600.0  # longer than any process leaves alone what it works on, and than clocks of two hosts differ


def remove_old(folder: Path, pattern: str) -> None:
    """Remove what is in `folder` under the names of a glob pattern and was not changed for a day, as far as one may.

    Who owns such a file may still live, so a younger one stays: there are no locks on shared disks to ask.
    """
    with suppress(OSError):
        for path in list(folder.glob(pattern)):
            if time.time() - path.lstat().st_mtime < _OLD_S:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
