"""Finding runs: which directories below a place hold one, and how each of them stands."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bulkrun.errors import BulkrunError
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.views.status import RunStatus, read_status


@dataclass(frozen=True)
class DamagedRun:
    """A run whose state cannot be read (damaged, or another user's); the others are listed all the same."""

    root: Path
    message: str
    state: Literal["damaged", "unreadable"] = "damaged"


def statuses(below: Path) -> list[RunStatus | DamagedRun]:
    """How the runs in a directory and below it stand."""
    return [_status(run) for run in find_runs(below)]


def _status(run: RunDir) -> RunStatus | DamagedRun:
    try:
        return read_status(run)
    except PermissionError as error:
        return DamagedRun(run.root, f"{error.filename}: {error.strerror}", "unreadable")
    except UnicodeError:
        printable = Path(os.fsencode(run.root).decode(errors="backslashreplace"))
        return DamagedRun(printable, "the path is not UTF-8, where no Parquet file can be read: rename the folder")
    except (BulkrunError, OSError) as error:
        return DamagedRun(run.root, str(error))


def find_runs(below: Path) -> list[RunDir]:
    """The runs in a directory and below it, sorted by path. Does not look inside runs or hidden directories.

    Directories that cannot be read are passed over, and so are links to directories: they may lead around in a circle.
    """
    runs = []
    for folder, names, _ in os.walk(below):
        run = RunDir(Path(folder))
        if _is_run(run):
            runs.append(run)
            names.clear()
        names[:] = [name for name in names if not name.startswith(".")]
    return sorted(runs, key=lambda run: run.root)


def _is_run(run: RunDir) -> bool:
    """Whether a directory holds a run, maybe one of somebody else: a run's state is its owner's alone."""
    try:
        return run.run_json.is_file()
    except PermissionError:
        return os.access(run.root, os.X_OK)  # so it is the state that cannot be read
