"""In which order a worker takes the shards of a job's adapters, each of which wants a model of its own.

Several workers begin with different ones, so that each adapter is loaded by few. Knows names, loads nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from hashlib import blake2b

from bulkrun.job.plan.plan_view import PlanView


def in_own_order(adapters: Iterable[str], worker: str) -> list[str]:
    """The adapters in an order that belongs to this worker: rendezvous hashing (Thaler and Ravishankar 1998)."""
    return sorted(adapters, key=lambda name: blake2b(f"{worker}|{name}".encode(), digest_size=8).digest())


def first_adapter(plan: PlanView, adapters: Collection[str], worker: str) -> str:
    """The one to load before any shard is claimed: of the shards that are open, else of the job's; "" without any."""
    waiting = {plan.shards[shard].adapter for shard in plan.open_shards} if adapters else set[str]()
    return next(iter(in_own_order(waiting or adapters, worker)), "")
