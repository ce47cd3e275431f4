"""Finding runs: which directories below a place hold one. Knows only what marks a run."""

from __future__ import annotations

import os
from pathlib import Path

from bulkrun.job.store.run_dir import RunDir


def find_runs(below: Path, *, depth: int = 4) -> list[RunDir]:
    """The runs in a directory and below it, sorted by path. Does not look inside runs or hidden directories.

    Directories that cannot be read are passed over.
    """
    runs = []
    for folder, names, _ in os.walk(below):
        run = RunDir(Path(folder))
        level = len(run.root.relative_to(below).parts)
        if run.run_json.is_file():
            runs.append(run)
            names.clear()
        elif level >= depth:
            names.clear()
        names[:] = [name for name in names if not name.startswith(".")]
    return sorted(runs, key=lambda run: run.root)
