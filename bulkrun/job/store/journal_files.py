"""Which journals there are, from one look at their folder: for those who ask for many shards at once."""

from __future__ import annotations

import re
from pathlib import Path

from bulkrun.job.store.run_dir import RunDir, file_names

_JOURNAL = re.compile(r"shard-(\d{5,})\.([^.]+)\.jsonl")


def journals_by_shard(run: RunDir) -> dict[int, list[Path]]:
    """What `run.journals_of` says of every shard that has a journal."""
    found: dict[int, list[Path]] = {}
    for name in sorted(file_names(run.journal)):
        if match := _JOURNAL.fullmatch(name):
            found.setdefault(int(match[1]), []).append(run.journal / name)
    return found


def attempts_by_shard(run: RunDir) -> dict[int, set[str]]:
    """What `run.attempts_at` says of every shard that has a journal."""
    found: dict[int, set[str]] = {}
    for name in file_names(run.journal):
        if match := _JOURNAL.fullmatch(name):
            found.setdefault(int(match[1]), set()).add(match[2])
    return found
