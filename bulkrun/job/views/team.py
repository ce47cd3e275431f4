"""The progress of all workers of a run together, from their heartbeat files: what the one view of a submit shows.

Any process on any node may work along, so nothing is assumed of who started whom. Reads; never writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.workers import LifeWatch, WorkerState, read_worker
from bulkrun.job.work.progress import ProgressSnapshot

_KNOWN = {field.name for field in fields(ProgressSnapshot)}


class TeamProgress:
    """Looks at the workers of one run again and again."""

    def __init__(self, run: RunDir, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._clock = run, clock
        self._life = LifeWatch(run, clock=clock)
        self._began = clock()
        self._gone: set[str] = set()  # a worker that is gone never comes back: ids are not used twice

    def snapshot(self) -> ProgressSnapshot | None:
        """The numbers now, None while nobody is at work."""
        states = [state for state in self._living() if state.role == "runner" and state.progress]
        if not states:
            return None
        return sum_snapshots([snapshot_of(state.progress) for state in states], elapsed_s=self._clock() - self._began)

    def is_there(self) -> bool:
        """Whether anybody works on the run or is about to: a model loads, a plan is made."""
        return any(self._living())

    def _living(self) -> Iterable[WorkerState]:
        for name in sorted(set(self._run.worker_ids()) - self._gone):
            state = read_worker(self._run, name)
            if state is not None and self._life.alive(state.worker):
                yield state
            elif state is not None:
                self._gone.add(name)


def snapshot_of(progress: Mapping[str, Any]) -> ProgressSnapshot:
    """What a heartbeat tells. Another version of bulkrun may publish more or fewer numbers."""
    return ProgressSnapshot(**{name: value for name, value in progress.items() if name in _KNOWN})


def sum_snapshots(team: list[ProgressSnapshot], *, elapsed_s: float) -> ProgressSnapshot:
    """One snapshot of all: what is committed is the same for everybody, what is open belongs to one worker each."""
    rows, errors, prompt_tokens, completion_tokens = (
        max(getattr(one, name) - getattr(one, f"{name}_open") for one in team)
        + sum(getattr(one, f"{name}_open") for one in team)
        for name in ("rows_done", "error_rows", "prompt_tokens", "completion_tokens")
    )
    total = max(one.rows_total for one in team)
    prompt_rate = sum(one.prompt_tokens_per_s for one in team)
    completion_rate = sum(one.completion_tokens_per_s for one in team)
    remaining = min(one.remaining_tokens for one in team)
    rate = prompt_rate + completion_rate
    return ProgressSnapshot(
        rows_total=total,
        rows_done=min(rows, total),  # a shard that two workers have open counts twice
        error_rows=errors,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        num_generations=sum(one.num_generations for one in team),
        remaining_tokens=remaining,
        rows_per_s=sum(one.rows_per_s for one in team),
        prompt_tokens_per_s=prompt_rate,
        completion_tokens_per_s=completion_rate,
        kv_cache_usage=sum(one.kv_cache_usage for one in team) / len(team),
        num_running=sum(one.num_running for one in team),
        num_waiting=sum(one.num_waiting for one in team),
        elapsed_s=elapsed_s,
        eta_s=remaining / rate if rate > 0 else None,
        plan_complete=any(one.plan_complete for one in team),
        generates=all(one.generates for one in team),
    )
