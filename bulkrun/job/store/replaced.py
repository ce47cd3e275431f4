"""Whether a directory still holds the run that a worker was started for: asked at every shard, so it must cost little.

With tens of thousands of input files run.json has megabytes. Every change of it is an atomic replace, hence another
file, so one that was read and is still the same file need not be read again.
"""

from __future__ import annotations

import os
from pathlib import Path

from bulkrun.data.storage.durable import read_json
from bulkrun.errors import RunError
from bulkrun.job.store.run_dir import RunDir


class OwnRun:
    """The run that this process was started for, in the directory where it was then. Any thread may ask."""

    def __init__(self, run: RunDir, run_id: str) -> None:
        self._run, self._run_id = run, run_id
        self._record: tuple[int, ...] | None = None  # the file that was read and said so

    def check(self) -> None:
        """Raise RunError when the directory no longer holds this run.

        A worker that was away (frozen, cut off) must not write into the run that took its place.
        """
        file = _file_at(self._run.run_json)  # before it is read: what replaces it meanwhile is another one next time
        if file is not None and file == self._record:
            return
        document = read_json(self._run.run_json)
        if document is None or document.get("run_id") != self._run_id:
            raise replaced_error(self._run)
        self._record = file


def replaced_error(run: RunDir) -> RunError:
    """What a worker says that finds another run, or none, in its directory."""
    return RunError(
        f"{run.root}: this run was moved aside (--fresh) or removed while this worker was away; it stops here"
    )


def _file_at(path: Path) -> tuple[int, ...] | None:
    """Which file has this name; opened for that, as network file systems ask the server then."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        found = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
