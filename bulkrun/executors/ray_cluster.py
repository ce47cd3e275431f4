"""Workers as Ray actors: each actor looks after one worker process, with the GPU and on the node that Ray chose.

Ray Core only (the extra `bulkrun[ray]`). An actor that dies is started again elsewhere, and its worker with it; what it
had finished is in the store. The worker is a process of its own, as everywhere: a row that kills it does not kill the
actor. Every node must see the run's directory and the input under the same paths. Knows no tokens and no tensors.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from bulkrun.errors import BulkrunError, ExecutorError, rebuilt
from bulkrun.executors.head_watch import HeadWatch
from bulkrun.executors.local import DRAIN_S, LocalWorkers
from bulkrun.executors.ray_connection import connected, gist, head_address
from bulkrun.job.jobfile.cluster import RaySpec
from bulkrun.job.store.run_dir import RunDir

WorkerCommand = Callable[[RunDir, str, int], list[str]]  # of a run, a worker's id and its supervisor's process id
Ended = tuple[str, str] | None  # the error that ended a worker: its class and its message

_TEND_EVERY_S = 0.2
_EACH_NODE = "each node needs bulkrun itself, and the run, the input and this folder under the same paths"
_PLACED_AFTER_S = 30.0  # usually; an actor starts within seconds


class WorkerHost:
    """What runs inside an actor. `folder` is where relative paths of the job begin."""

    def __init__(self, run: RunDir, command: WorkerCommand, folder: str) -> None:
        os.chdir(folder)
        self._stopping = threading.Event()
        self._workers = LocalWorkers(run, partial(_call, command, run), [{}])

    def work(self) -> Ended:
        """Look after the worker until it ends or `stop` was called."""
        try:
            while not self._stopping.is_set() and self._workers.tend():
                time.sleep(_TEND_EVERY_S)
            for error in self._workers.stop():
                raise error
        except BulkrunError as error:
            return type(error).__name__, str(error)
        return None

    def is_placed(self) -> bool:
        """An answer at all means that Ray found a place."""
        return True

    def stop(self) -> None:
        """Let the worker save and end; `work` returns then."""
        self._stopping.set()


def _call(command: WorkerCommand, run: RunDir, worker: str) -> list[str]:
    return command(run, worker, os.getpid())


class RayWorkers:
    """`count` workers of one run on a Ray cluster; used as `LocalWorkers` is.

    `say` hears of workers that wait for a place. Raises ExecutorError where there can be none: a local Ray does not
    grow, as a cluster may.
    """

    def __init__(
        self, run: RunDir, command: WorkerCommand, count: int, spec: RaySpec, say: Callable[[str], None]
    ) -> None:
        self._address = head_address(spec)
        self._ray = connected(self._address)
        run = RunDir(run.root.resolve())
        gpus = spec.gpus if spec.gpus is not None else float("GPU" in self._ray.cluster_resources())
        self._wanted = {"CPU": spec.cpus, "GPU": gpus}
        if self._address is None and any(self._wanted[kind] > most for kind, most in self._largest().items()):
            raise ExecutorError(f"no worker fits on this machine: {self._needs()}; lower ray.cpus or ray.gpus")
        # -1: for ever. An actor that was lost starts again, and so does its call, which is safe to repeat.
        again = {"max_restarts": -1, "max_task_retries": -1}
        host = self._ray.remote(max_concurrency=2, num_gpus=gpus, num_cpus=spec.cpus, **again)(WorkerHost)
        self._hosts = [host.remote(run, command, str(Path.cwd())) for _ in range(count)]
        self._placed = [actor.is_placed.remote() for actor in self._hosts]
        self._calls = [actor.work.remote() for actor in self._hosts]
        self._say, self._say_at, self._waiting = say, time.monotonic() + _PLACED_AFTER_S, 0
        self._head = HeadWatch(self._ray.nodes)

    def tend(self) -> bool:
        """Whether anybody works or will again. Raises the error that ended a worker, ExecutorError without a head."""
        if self._head.is_silent():
            where = f"head at {self._address}" if self._address else "of this machine"
            raise ExecutorError(
                f"the Ray {where} does not answer; what is finished is saved; the same command continues"
            )
        self._say_who_waits()
        done, going = self._ray.wait(self._calls, num_returns=len(self._calls), timeout=0)
        for call in done:
            if (error := self._ended(call)) is not None:
                raise error
        return bool(going)

    def stop(self, grace_s: float = DRAIN_S) -> list[BulkrunError]:
        """Let all save and end, and end those that do not. Returns the errors that kept some from saving."""
        _, going = self._ray.wait(self._calls, num_returns=len(self._calls), timeout=0)
        for actor, call in zip(self._hosts, self._calls, strict=True):
            if call in going:  # to one that has ended it would only fail, with words of Ray's, when that is killed
                actor.stop.remote()
        # The host ends a worker after its own grace; a little longer lets it say how that went.
        done, _ = self._ray.wait(self._calls, num_returns=len(self._calls), timeout=grace_s + 5.0)
        ended = [self._ended(call) for call in done]
        self.kill()
        return [error for error in ended if error is not None]

    def kill(self) -> None:
        """End all at once: a worker notices within a second that its actor is gone."""
        self._head.stop()
        for actor in self._hosts:
            with suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor)

    def _say_who_waits(self) -> None:
        """After a while, and again when others wait, as those whose node died: Ray itself says nothing, and waits."""
        if time.monotonic() < self._say_at:
            return
        self._say_at = time.monotonic() + _PLACED_AFTER_S
        _, waiting = self._ray.wait(self._placed, num_returns=len(self._placed), timeout=0)
        if waiting and len(waiting) != self._waiting:
            self._say(f"Ray has no room yet for {len(waiting)} of {len(self._hosts)} workers: {self._needs()}")
        self._waiting = len(waiting)
        asked = zip(self._hosts, self._placed, strict=True)
        self._placed = [call if call in waiting else actor.is_placed.remote() for actor, call in asked]

    def _needs(self) -> str:
        """What each worker asks for, beside what a node has."""
        asks = [
            f"{want:g} {kind}{'' if want == 1 else 's'} (a node has {self._largest()[kind]:g})"
            for kind, want in self._wanted.items()
            if want
        ]
        return f"each asks for {' and '.join(asks)}"

    def _largest(self) -> dict[str, float]:
        """The most that any node has of what is wanted, busy or not."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return {kind: max((node.get(kind, 0.0) for node in nodes), default=0.0) for kind in self._wanted}

    def _ended(self, call: Any) -> BulkrunError | None:
        try:
            ended: Ended = self._ray.get(call)
        except self._ray.exceptions.RayError as error:
            to_do = (
                _EACH_NODE if "creation task" in str(error) else "what is finished is saved; the same command continues"
            )
            return ExecutorError(f"Ray lost a worker for good: {gist(error).rstrip('.')}; {to_do}")
        return None if ended is None else rebuilt(*ended)
