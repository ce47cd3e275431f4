"""One writer at a time: who changes a finished run holds its `update` claim, and says so with a heartbeat.

Who needs it as it is says so with a heartbeat too. Both look for the other after their own is there, so one of them
sees the other. Knows nothing of what is changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from bulkrun.data.storage.durable import remove_tree
from bulkrun.errors import RunError
from bulkrun.job.store.aside import refuse_live_workers
from bulkrun.job.store.claims import Claims
from bulkrun.job.store.heartbeat import Heartbeat, present
from bulkrun.job.store.run_dir import RunDir, make_state_dirs
from bulkrun.job.store.workers import LifeWatch, Worker, read_workers
from bulkrun.job.work.finish import remove_old_temporaries

_CLAIM = "update"
_LOOK_EVERY_S = 1.0
_ROLE = "updater"
_KEEPER = "keeper"


@contextmanager
def hold(
    run: RunDir, *, life: LifeWatch | None = None, sleep: Callable[[float], None] = time.sleep
) -> Iterator[Worker]:
    """Be the only one that changes this run. Raises RunError, naming the process, when a worker or another
    changer is alive in it; takes up to half a minute where one died on another host, or before a reboot."""
    make_state_dirs(run)
    worker, life = Worker.this_process(), life or LifeWatch(run)
    claims = Claims(run, worker, life)
    _take(claims, run, life, sleep)
    _forget_the_dead(run, life)
    remove_old_temporaries(run)
    heartbeat = Heartbeat(run, worker, dict, role=_ROLE)
    ended = "failed"
    try:
        heartbeat.start()
        refuse_live_workers(run, matters=lambda state: state.worker.id != worker.id, life=life, sleep=sleep)
        yield worker
        ended = "completed"
    finally:
        claims.release(_CLAIM)  # before the goodbye: nobody else sees a claim here that is free
        heartbeat.stop(ended)


@contextmanager
def kept_unchanged(run: RunDir, *, sleep: Callable[[float], None] = time.sleep) -> Iterator[None]:
    """Let nobody begin to change this run while the body runs. Raises RunError, naming the process, if one has."""
    make_state_dirs(run)
    with present(run, Worker.this_process(), _KEEPER):
        refuse_live_workers(run, matters=lambda state: state.role == _ROLE, sleep=sleep)
        yield


def refuse_lost_hold(run: RunDir) -> None:
    """Raise RunError unless this process still holds the run: asked right before each write that others see.

    A process that was frozen (a file server that hung, a virtual machine that was paused) is taken for dead after half
    a minute; when it wakes up, another one may have finished its change and the next. A claim cannot stop a write, so a
    gap remains: a freeze that begins between this look and the write, or a network file system that still shows the
    claims of some seconds ago.
    """
    owner = Claims(run, Worker.this_process(), LifeWatch(run)).owner(_CLAIM)
    if owner is None or owner != Worker.this_process(owner.id):
        raise lost_hold(run)


def lost_hold(run: RunDir) -> RunError:
    """The error of a process whose change another one took over."""
    return RunError(
        f"{run.root}: another process took over while this one was frozen or cut off from the disk; this one stops "
        "here and changes nothing more: run the same command again"
    )


def _take(claims: Claims, run: RunDir, life: LifeWatch, sleep: Callable[[float], None]) -> None:
    """Take the claim once nobody is alive. Both are asked of one `life`: who was just seen dead is alive at the first
    sight of another, and a claim may outlast the heartbeat of its owner (a power cut empties that)."""
    refuse_live_workers(run, life=life, sleep=sleep)
    while not claims.take(_CLAIM):
        sleep(_LOOK_EVERY_S)
        refuse_live_workers(run, life=life, sleep=sleep)


def _forget_the_dead(run: RunDir, life: LifeWatch) -> None:
    """Remove the heartbeats of changers and keepers before this one, of whom a thousand nights leave a thousand, and of
    those who died without a goodbye: where that was on another host, everybody after them would wait again. With the
    heartbeat of a planner go the rows that it kept: no later planner would know that they are nobody's."""
    for state in read_workers(run):
        if (state.role in (_ROLE, _KEEPER) or state.ended is None) and not life.alive(state.worker):
            with suppress(RunError, OSError):
                remove_tree(run.spool / state.worker.id)
                (run.workers / f"{state.worker.id}.json").unlink(missing_ok=True)
