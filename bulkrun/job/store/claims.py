"""Who works on what: `claims/NAME.EPOCH`, made by exclusive publish, taken over with the next epoch.

A claim only saves double work: two workers on one shard are harmless, because publishing a part is exclusive. So a
claim is never renewed or fenced; it is as alive as the worker that owns it. Used for shards and for the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path

from bulkrun.data.storage.documents import advice_from
from bulkrun.data.storage.durable import read_json, write_new_json
from bulkrun.job.store.run_dir import RunDir, file_names
from bulkrun.job.store.workers import LifeWatch, Worker


class Claims:
    """The claims of a run as one worker sees them."""

    def __init__(self, run: RunDir, worker: Worker, life: LifeWatch) -> None:
        self._run, self._worker, self._life = run, worker, life
        self._owners: dict[str, Worker] = {}  # as last seen; a released claim's name may be another's by now

    def take(self, name: str) -> bool:
        """Claim `name` for this worker if it is free, ours, or its owner is dead. Raises RunError on a bad disk."""
        epoch, path = self._newest(name)
        if path is not None:
            owner = self._owner(path)
            if owner == self._worker:
                return True
            if owner is not None and self._life.alive(owner):
                return False
        return write_new_json(self._run.claims / f"{name}.{epoch + 1}", asdict(self._worker))

    def free_shards(self, shards: Iterable[int]) -> Iterator[int]:
        """Those that no other living worker seems to hold, by one look at all claims; `take_shard` looks closer.

        Many may be held, by many workers: what a claim said before is taken for what it says.
        """
        newest = self._newest_epochs()
        alive = cache(self._life.alive)
        for shard in shards:
            name = self._run.shard_claim(shard)
            owner = self._known_owner(f"{name}.{newest[name]}") if name in newest else None
            if owner is None or owner == self._worker or not alive(owner):
                yield shard

    def owner(self, name: str) -> Worker | None:
        """Who claimed `name` last, dead or alive; None where nobody did."""
        _, path = self._newest(name)
        return None if path is None else self._owner(path)

    def take_shard(self, shard: int) -> bool:
        """Claim a shard for this worker."""
        return self.take(self._run.shard_claim(shard))

    def release(self, name: str) -> None:
        """Give up a claim that is ours, and those of the dead it was taken over from, for whom the next one would wait.

        One that cannot be removed is as dead as this worker will be.
        """
        epoch, path = self._newest(name)
        if path is not None and self._owner(path) == self._worker:
            with suppress(OSError):
                for number in range(1, epoch + 1):
                    (self._run.claims / f"{name}.{number}").unlink(missing_ok=True)

    def _newest(self, name: str) -> tuple[int, Path | None]:
        epochs = [int(path.suffix[1:]) for path in self._run.claims_of(name) if path.suffix[1:].isdigit()]
        epoch = max(epochs, default=0)
        return epoch, self._run.claims / f"{name}.{epoch}" if epoch else None

    def _newest_epochs(self) -> dict[str, int]:
        newest: dict[str, int] = {}
        for file in file_names(self._run.claims):
            name, _, epoch = file.rpartition(".")
            if epoch.isdigit() and int(epoch) > newest.get(name, 0):
                newest[name] = int(epoch)
        return newest

    def _known_owner(self, file: str) -> Worker | None:
        if file not in self._owners and (owner := self._owner(self._run.claims / file)) is not None:
            self._owners[file] = owner
        return self._owners.get(file)

    def _owner(self, path: Path) -> Worker | None:
        """The worker named in a claim; None when the claim is gone or a power cut emptied it."""
        document = read_json(path) if _has_bytes(path) else None
        return None if document is None else advice_from(Worker, document)


def _has_bytes(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False
