"""Which journals there are, from one look at their folder: for those who ask for many shards at once."""

from __future__ import annotations

from pathlib import Path

from bulkrun.job.store.run_dir import JOURNAL_NAME, RunDir, attempt_of, file_names


def journals_by_shard(run: RunDir) -> dict[int, list[Path]]:
    """What `run.journals_of` says of every shard that has a journal."""
    found: dict[int, list[Path]] = {}
    for name in sorted(file_names(run.journal)):
        if match := JOURNAL_NAME.fullmatch(name):
            found.setdefault(int(match[1]), []).append(run.journal / name)
    return found


def attempts_by_shard(run: RunDir) -> dict[int, set[str]]:
    """What `run.attempts_at` says of every shard that has a journal."""
    return {shard: set(map(attempt_of, paths)) for shard, paths in journals_by_shard(run).items()}
