"""Asking workers to stop, through the store: reaches every node, needs no signal and no shared pid.

A request names the workers that lived when it was made; workers that start later have other ids and go on. Knows
no processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from bulkrun.job.store.durable import read_json, replace_json
from bulkrun.job.store.run_dir import RunDir

_LOOK_AGAIN_S = 1.0


def request_cancel(run: RunDir, workers: Iterable[str]) -> None:
    """Ask these workers to save and stop."""
    known = (read_json(run.cancelled) or {}).get("workers", [])
    replace_json(run.cancelled, {"workers": sorted({*known, *workers})})


def asked_to_stop(run: RunDir, workers: Iterable[str]) -> bool:
    """Whether any of these workers was asked to."""
    return not set(workers).isdisjoint((read_json(run.cancelled) or {}).get("workers", []))


class CancelWatch:
    """Whether a worker was asked to stop; cheap enough to ask between any two steps."""

    def __init__(self, run: RunDir, worker: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._worker, self._clock = run, worker, clock
        self._next_look = clock()
        self._cancelled = False

    def __call__(self) -> bool:
        if not self._cancelled and self._clock() >= self._next_look:
            self._next_look = self._clock() + _LOOK_AGAIN_S
            self._cancelled = asked_to_stop(self._run, [self._worker])
        return self._cancelled
